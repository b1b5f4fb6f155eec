"""Applies to every test: a clean environment, reproducible examples, ports that no parallel run takes, and no process or temporary
file left behind.
"""

import ast
import functools
import gc
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
import trustme

from tests.examples import ALL
from triptych.cli import ports

# Without a GPU its kernels are interpreted. Read when triton is imported, which other conftests do.
if not Path("/proc/driver/nvidia").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # noqa: TID251

# Examples are the same on every run, so that a failure is reproducible on every machine;
# --hypothesis-profile=explore tries other examples. `make check` tries a fifth of them, `make test` all.
hypothesis.settings.register_profile("ci", max_examples=ALL, derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("check", hypothesis.settings.get_profile("ci"), max_examples=ALL // 5)
hypothesis.settings.register_profile("explore", max_examples=2000, database=None, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci")


def _one_at_a_time(parse: Callable[..., ast.AST]) -> Callable[..., ast.AST]:
    lock = threading.RLock()

    @functools.wraps(parse)
    def alone(*args: object, **options: object) -> ast.AST:
        with lock:
            return parse(*args, **options)

    return alone


if sys.version_info < (3, 11, 8):
    # It counts the depth of all syntax trees in one place (gh-106905). When garbage is collected meanwhile and another thread
    # parses too, as kernels do, both fail: within pytest that ends the session.
    ast.parse = _one_at_a_time(ast.parse)  # type: ignore[assignment]

DAYS = 3
"""In so many days continuous integration runs every test that is marked ``extended``."""
DAY = os.environ.get("TRIPTYCH_TEST_DAY")  # noqa: TID251  # whoever runs the tests chooses the part
TESTS = Path(__file__).parent
TIMEOUT_S = {"benchmarks": 180.0, "e2e": 240.0, "simulation": 240.0}
"""Limit of a test that states none, by its folder; ``timeout`` in pyproject.toml elsewhere."""
ENDING_S = 60.0
"""Time for processes to end after their last use."""
PATIENCE = 4
"""How many times the stated limit a test may take. Limits are for a machine without other work, and end what hangs."""


def pytest_configure() -> None:
    """Removes settings from the environment (TRIPTYCH_TEST_... name optional inputs); no test downloads models."""
    settings = [name for name in os.environ if name.startswith("TRIPTYCH_") and not name.startswith("TRIPTYCH_TEST_")]  # noqa: TID251  # it is the subject
    for name in settings:
        del os.environ[name]  # noqa: TID251
    os.environ["HF_HUB_OFFLINE"] = "1"  # noqa: TID251  # read by huggingface_hub when it is imported
    _take_a_share_of_ports()


def pytest_report_header() -> str | None:
    return (
        None
        if DAY is None
        else f"of tests marked extended, part {int(DAY) % DAYS + 1} of {DAYS} (TRIPTYCH_TEST_DAY={DAY})"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks a test by its folder: `make check` takes unit tests only, and neither it nor `make test` runs benchmarks."""
    if (folder := _folder(item)) != "unit":
        item.add_marker("slow")
    if folder == "benchmarks":
        item.add_marker("extended")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects garbage neither while test modules are imported nor, later, among what they hold: it stays until the end.

    A full collection would visit some million objects of torch and transformers, and takes most of a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps what this day's part is, and multiplies limits."""
    if DAY is not None:
        others = set(_of_other_days(items, int(DAY)))
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    usual_s = float(config.getini("timeout"))
    for item in items:
        stated = item.get_closest_marker("timeout")
        limit_s = TIMEOUT_S.get(_folder(item), usual_s) if stated is None else stated.args[0]
        item.add_marker(pytest.mark.timeout(PATIENCE * limit_s), append=False)


def _folder(item: pytest.Item) -> str:
    """Below ``tests``."""
    return item.path.relative_to(TESTS).parts[0]


def _of_other_days(items: list[pytest.Item], day: int) -> Iterator[pytest.Item]:
    """Cases with the same parameters, such as a family or a seed, have the same day. So have the tests of a file without parameters."""
    places: dict[str, int] = {}
    for item in items:
        if item.get_closest_marker("extended"):
            parameters = getattr(item, "callspec", None)
            case = item.path.name if parameters is None else parameters.id
            if places.setdefault(case, len(places)) % DAYS != day % DAYS:
                yield item


def _take_a_share_of_ports() -> None:
    """Free ports are chosen seconds before processes listen on them, so xdist's workers must not choose from the same ones."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))  # noqa: TID251  # set by xdist in its workers
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))  # noqa: TID251
    share = len(ports.RANGE) // workers
    ports.RANGE = ports.RANGE[number * share : (number + 1) * share]


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clusters keep the logs of processes that were killed: in one directory, which stays only if a test has failed."""
    tmp_path_factory.getbasetemp()  # pytest keeps these directories, and removes them later
    before = tempfile.tempdir
    directory = tempfile.mkdtemp(prefix="triptych-tests-")
    tempfile.tempdir = directory
    _trust_one_authority(Path(directory) / "authority.pem")
    yield
    tempfile.tempdir = before
    if not request.session.testsfailed:
        shutil.rmtree(directory)


def _trust_one_authority(path: Path) -> None:
    """Each client of HTTP reads all authorities that it trusts: 24 ms for the public ones, which no test needs."""
    trustme.CA().cert_pem.write_to_path(path)
    os.environ["SSL_CERT_FILE"] = str(path)  # noqa: TID251  # read by httpx


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test module must end the processes that it starts."""
    if not any(_may_start_processes(item) for item in request.session.items if item.path == request.path):
        yield
        return
    before = set(_children())
    yield
    left = [child for child in _children() if child not in before]
    _, alive = psutil.wait_procs(left, timeout=ENDING_S)
    names = [_name(child) for child in alive]
    for child in alive:
        child.kill()
    assert not names, f"processes left behind: {names}"


def _children() -> list[psutil.Process]:
    """Processes below this one, without those that the standard library keeps for reuse."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "multiprocessing" not in _name(child)]


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return f"process {process.pid}"


_PROCESS_EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"})
_LISTS_FONTS = "fc-list"
"""What matplotlib starts the first time that anything is drawn on a machine."""
_refusing = False


@pytest.fixture(autouse=True)
def _unmarked_tests_start_no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that `make check` runs must not start processes."""
    global _refusing  # noqa: PLW0603 - an audit hook cannot be taken back
    _refusing = not _may_start_processes(request.node)
    yield
    _refusing = False


def _may_start_processes(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(mark) for mark in ("slow", "extended"))


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    if _refusing and event in _PROCESS_EVENTS and arguments[:1] != (_LISTS_FONTS,):
        raise AssertionError(f"{event} {arguments[:2]}: mark the test as `slow`, then `make check` leaves it out")


sys.addaudithook(_refuse_processes)
