"""Every reader of a file that an operator names, and every number of the command line, with what does not belong there."""

import inspect
import os
import random
import socket
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
from typer.models import OptionInfo

from tests.command_line import invoke
from triptych.cli.authority import Authority
from triptych.cli.files import local_file
from triptych.cli.main import app
from triptych.cli.outcome import CliError
from triptych.client.images import media_bytes
from triptych.domain.profile import BadProfile
from triptych.errors import InvalidMedia
from triptych.families.model_files import BadModel, ModelFiles
from triptych.files import BadFile, read_json, read_text, read_toml
from triptych.runtime.profiles import read_profile
from triptych.runtime.settings import SettingsError
from triptych.runtime.tls import TlsIdentity
from triptych.services.gateway.keys import read_key_file
from triptych.services.gateway.settings import GatewaySettings
from triptych.services.router.membership import read_members
from triptych.workload.requests import WorkloadError
from triptych.workload.traces import Span, load

DIGITS = "9" * 5000
"""More than Python reads as one integer."""
EXTREMES = (str(2**64), DIGITS, "nan", "inf", "-1e400", "one")


def _as(name: str, path: Path) -> Path:
    """A new directory in which ``path`` has this name."""
    directory = path.parent / f"with-{name}"
    directory.mkdir()
    (directory / name).symlink_to(path)
    return directory


def _dataset(path: Path) -> object:
    directory = _as("chunk-0-dataset.json", path)
    (directory / "chunk-0-trace.csv").write_text("0,1,1,Gamma,1,1\n")
    return load(directory, Span(0.0, 1.0), None, random.Random(0))


TEXTS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "settings": (lambda path: GatewaySettings.load(["--config", str(path)], {}), SettingsError),
    "keys": (read_key_file, ValueError),
    "members": (read_members, ValueError),
    "profile": (read_profile, BadProfile),
    "configuration of a model": (lambda path: ModelFiles.load(_as("config.json", path)), BadModel),
    "chat template": (
        lambda path: read_text(_as("chat_template.jinja", path) / "chat_template.jinja", 1 << 20),
        BadFile,
    ),
    "certificate": (lambda path: TlsIdentity.load(path, path, path), ValueError),
    "key of the authority": (lambda path: Authority.read(_as("ca.key", path)), CliError),
    "trace of ServeGen": (
        lambda path: load(_as("chunk-0-trace.csv", path), Span(0.0, 1.0), None, random.Random(0)),
        WorkloadError,
    ),
    "data set of ServeGen": (_dataset, WorkloadError),
    "trace of Azure": (lambda path: load(path, Span(0.0, 1.0), None, random.Random(0)), WorkloadError),
    "compressed trace": (
        lambda path: load(_as("trace.csv.gz", path) / "trace.csv.gz", Span(0.0, 1.0), None, random.Random(0)),
        WorkloadError,
    ),
    "JSON": (lambda path: read_json(path, 1 << 20), BadFile),
    "TOML": (lambda path: read_toml(path, 1 << 20), BadFile),
}
MEDIA: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "attachment": (local_file, CliError),
    "image of the SDK": (lambda path: media_bytes(path, "image"), InvalidMedia),
}


@pytest.fixture
def unreadable(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Paths that are no regular files."""
    paths = {name: tmp_path / name for name in ("nothing", "directory", "pipe", "endless", "socket")}
    paths["directory"].mkdir()
    os.mkfifo(paths["pipe"])
    paths["endless"].symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(paths["socket"]))
        yield paths


VALID = {("key of the authority", "nothing"), ("trace of Azure", "directory")}
"""A folder in which an authority is made, and a directory of ServeGen that has no trace yet."""
KINDS = ("nothing", "directory", "pipe", "endless", "socket")


@pytest.mark.parametrize(("reader", "kind"), [case for case in product([*TEXTS, *MEDIA], KINDS) if case not in VALID])
def test_what_is_no_regular_file_is_refused_at_once(reader: str, kind: str, unreadable: dict[str, Path]) -> None:
    read, refusal = (TEXTS | MEDIA)[reader]
    with pytest.raises(refusal) as caught:
        read(unreadable[kind])
    assert "\n" not in str(caught.value)


NONSENSE = {
    "not UTF-8": b"a = '\xff\xfe'\n",
    "nested TOML": b"a = " + b"[" * 100_000,
    "nested tables": b"a = " + b"{a=" * 100_000,
    "nested JSON": b"[" * 100_000,
    "a long number": f"a = {DIGITS}\n".encode(),
    "a long JSON number": DIGITS.encode(),
    "NUL": b"\x00",
    "half a file": b'{"a": ',
}


@pytest.mark.parametrize("content", list(NONSENSE))
@pytest.mark.parametrize("reader", [name for name in TEXTS if name not in {"chat template", "JSON", "TOML"}])
def test_a_file_of_nonsense_is_refused_in_one_message(reader: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(NONSENSE[content])
    read, refusal = TEXTS[reader]
    with pytest.raises(refusal) as caught:
        read(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("reader", [name for name in TEXTS if "trace" not in name and "ServeGen" not in name])
def test_a_file_that_is_too_large_is_refused(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 300 << 20)  # a sparse file
    read, refusal = TEXTS[reader]
    with pytest.raises(refusal):
        read(path)


@pytest.mark.parametrize("setting", ["port", "drain_s", "max_connections"])
def test_a_switch_is_no_number_in_a_configuration(setting: str, tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(f"{setting} = true\n" if setting != "max_connections" else "[edge]\nmax_connections = true\n")
    with pytest.raises(SettingsError, match=f"{setting}"):
        GatewaySettings.load(["--config", str(path)], {})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max-connections", str(2**63)), ("request-timeout-s", "1e9"), ("loop-lag-warn-s", "inf"), ("drain-s", "nan")],
)
def test_a_setting_beyond_every_machine_is_refused(setting: str, value: str) -> None:
    with pytest.raises(SettingsError, match=setting.replace("-", "_")):
        GatewaySettings.load([f"--{setting}", value], {})


def _numbers() -> Iterator[tuple[str, str | None]]:
    """The command and the option of every number; an argument has no option."""
    for command in app.registered_commands + [
        command
        for group in app.registered_groups
        if group.typer_instance
        for command in group.typer_instance.registered_commands
    ]:
        assert command.callback is not None
        for parameter in inspect.signature(command.callback).parameters.values():
            if get_origin(parameter.annotation) is not Annotated:
                continue
            kind, option = get_args(parameter.annotation)[:2]
            if {int, float} & {kind, *get_args(kind)}:
                names = option.param_decls or ["--" + parameter.name.replace("_", "-")]
                name = command.name or command.callback.__name__
                yield name, names[0] if isinstance(option, OptionInfo) else None


ARGUMENTS = {"chat": ["hi"], "profile": ["demo"], "scale": ["E"]}


@pytest.mark.parametrize(("command", "option"), list(_numbers()))
def test_every_number_of_the_command_line_has_bounds(command: str, option: str | None) -> None:
    for value in EXTREMES:
        given = [value] if option is None else [option, value]
        result = invoke([command, *ARGUMENTS.get(command, []), *given])
        assert result.exit_code == 2, (value[:30], result.output)
        assert isinstance(result.exception, SystemExit)


TEXTS_WITH_NUMBERS: list[list[str]] = [
    ["up", "--roles", "E:4294967296,PD:1"],
    ["up", "--roles", f"E:{DIGITS},PD:1"],
    ["up", "--autoscale", "--pool-sizes", f"E=1-{DIGITS}"],
    ["up", "--slo", "ttft=1e400x,tbt=5x"],
    ["up", "--slo", f"ttft={DIGITS}s"],
    ["scale", "E", "1", "--for", f"{DIGITS}h"],
    ["drain", "x", "--wait", "1e400h"],
    ["bench", "--sweep", "nan"],
    ["bench", "--sweep", "1e308"],
    ["bench", "--rate", "1", "--images", DIGITS],
    ["bench", "--rate", "1", "--images", "1:nan"],
    ["bench", "--rate", "1", "--images", "1:1e308,2:1e308"],
    ["bench", "--rate", "1", "--image-size", f"{DIGITS}x1"],
    ["bench", "--rate", "1", "--output-tokens", f"1:{DIGITS}"],
    ["status", "--pool-manager", f"127.0.0.1:{DIGITS}"],
]


@pytest.mark.parametrize("given", TEXTS_WITH_NUMBERS, ids=lambda given: " ".join(given)[:40])
def test_numbers_within_texts_of_the_command_line_have_bounds(given: list[str]) -> None:
    result: Any = invoke(given)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
