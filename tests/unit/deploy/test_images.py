"""The Dockerfiles: what they install is pinned, suffices and holds no torch where none is needed, and their twins stay twins.

That they build and run is shown by ``make test-compose``.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.lock import EXTRAS, OF_TORCH

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "deploy" / "images"
SERVICES = ("encoder", "gateway", "pool_manager", "router", "text")
WITHOUT_TORCH = ("gateway", "pool_manager", "router")

_IMPORTS = """
import sys

absent = set(sys.argv[1].split(","))

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Absent())
for module in sys.argv[2:]:
    __import__(module)
"""
_MORE_MODULES = {
    "pool_manager": (
        "triptych.cli.main",
        "triptych.cli.certs",
        "triptych.cli.plan.again",
        "triptych.store.redis",
        "triptych.integrations.kubernetes.api",
    ),
    "gateway": ("triptych.media.fetch", "triptych.services.gateway.keys"),
}
"""What an image runs beside its service, or imports when it is used."""


def dockerfile(service: str) -> str:
    return (IMAGES / f"{service}.Dockerfile").read_text()


def stage(text: str, name: str) -> str:
    return re.split(r"^FROM ", text.split(f" AS {name}\n")[1], flags=re.MULTILINE)[0]


def installed_from(service: str) -> str:
    """The name of the file of requirements that the image installs."""
    (name,) = re.findall(r"--require-hashes --requirement (\w+)\.txt", stage(dockerfile(service), "packages"))
    return str(name)


def pinned(name: str) -> dict[str, str]:
    """Versions of packages by name."""
    lines = (IMAGES / "requirements" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([\w-]+)==(\S+)", lines, flags=re.MULTILINE))


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def required(extras: Iterable[str]) -> Iterator[Requirement]:
    """What pyproject.toml requires with these extras, of others."""
    optional = project()["project"]["optional-dependencies"]
    for requirement in map(Requirement, (line for extra in extras for line in optional[extra])):
        if requirement.name == "triptych":
            yield from required(requirement.extras)
        else:
            yield requirement


def closure(distribution: str, wanted: set[str]) -> Iterator[str]:
    """Names of all distributions that it requires with these extras, and theirs; markers are those of this platform."""
    seen: set[tuple[str, str]] = set()
    todo = [(distribution, extra) for extra in {"", *wanted}]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        yield canonicalize_name(name)
        for requirement in map(Requirement, requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                todo += [(requirement.name, part) for part in ("", *requirement.extras)]


def test_every_service_has_one_dockerfile() -> None:
    assert sorted(path.name.removesuffix(".Dockerfile") for path in IMAGES.glob("*.Dockerfile")) == list(SERVICES)


@pytest.mark.slow
@pytest.mark.parametrize("service", WITHOUT_TORCH)
def test_a_service_without_torch_needs_only_what_its_image_installs(service: str) -> None:
    assert installed_from(service) == service
    installed = set(closure("triptych", set(EXTRAS[service])))
    assert not installed & {"torch", "transformers", "numpy", "safetensors", "av", "pillow"}
    absent = {
        module
        for module, owners in packages_distributions().items()
        if not installed & {canonicalize_name(owner) for owner in owners}
    }
    assert {"torch", "transformers", "numpy", "safetensors", "av", "PIL"} <= absent
    modules = (
        f"triptych.services.{service}.app",
        f"triptych.services.{service}.settings",
        *_MORE_MODULES.get(service, ()),
    )
    command = [sys.executable, "-c", _IMPORTS, ",".join(absent), *modules]
    assert subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, cwd=ROOT).stderr == ""


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_runs_its_service_as_an_ordinary_user(service: str) -> None:
    text = dockerfile(service)
    last = text[text.rindex("\nFROM ") :]
    assert "\nUSER 10001:10001\n" in last
    assert f'\nENTRYPOINT ["/opt/triptych/bin/python", "-m", "triptych.services.{service}"]' in last
    assert re.search(r"\nHEALTHCHECK [^\n]*\\\n    CMD \[.*ready\.py\"\]\n", last)
    assert f"TRIPTYCH_{service.upper()}_ADMIN_PORT=9100" in last
    assert "COPY --from=packages" in last


@pytest.mark.parametrize("service", SERVICES)
def test_no_dockerfile_needs_more_than_its_base_image_and_pip(service: str) -> None:
    text = dockerfile(service)
    assert re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE) == ["${PYTHON}"] * 3
    assert "ARG PYTHON=python:3.11-slim-bookworm\n" in text
    assert "syntax=" not in text, "a frontend from a registry"
    assert "://" not in text, "the address of an index"
    assert not re.search(r"^ADD ", text, flags=re.MULTILINE)


def test_common_stages_are_the_same_so_that_they_are_built_once() -> None:
    assert len({stage(dockerfile(service), "code") for service in SERVICES}) == 1
    assert stage(dockerfile("encoder"), "packages") == stage(dockerfile("text"), "packages")
    named = {stage(dockerfile(service), "packages").replace(f"{service}.txt", "") for service in WITHOUT_TORCH}
    assert len(named) == 1


def test_the_torch_of_the_images_is_the_one_that_is_tested() -> None:
    tested = f"torch=={pinned('constraints')['torch']}"
    assert f"\nTORCH ?= {tested}\n" in (ROOT / "Makefile").read_text()
    assert f'"${{TORCH:-{tested}}}"' in (ROOT / "scripts" / "setup.sh").read_text()


def test_the_extra_all_has_whatever_a_service_may_use() -> None:
    optional = project()["project"]["optional-dependencies"]
    (everything,) = map(Requirement, optional["all"])
    found = {"all", *everything.extras}
    for extra in everything.extras:
        found |= {
            included
            for line in map(Requirement, optional[extra])
            if line.name == "triptych"
            for included in line.extras
        }
    apart = {"demo", "vllm"}  # for training the demo model; an engine that has an environment of its own
    assert set(optional) - found == apart


@pytest.mark.parametrize("name", EXTRAS)
def test_what_an_image_installs_fits_what_the_project_requires(name: str) -> None:
    versions = pinned(name) | {"torch": pinned("constraints")["torch"]}
    own = map(Requirement, project()["project"]["dependencies"])
    for requirement in (*own, *required(EXTRAS[name])):
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier, f"{requirement}: run make lock"
    for requirement in map(Requirement, project()["build-system"]["requires"]):
        assert pinned("build")[requirement.name] in requirement.specifier, f"{requirement}: run make lock"


@pytest.mark.parametrize("name", ["build", *EXTRAS])
def test_packages_of_images_are_pinned_by_digest(name: str) -> None:
    text = (IMAGES / "requirements" / f"{name}.txt").read_text()
    packages = re.split(r"\n(?=\w)", text.rstrip("\n"))[1:]
    assert packages
    for package in packages:
        assert re.fullmatch(r"[\w-]+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", package), package


def test_images_have_the_same_versions() -> None:
    files = {path.stem for path in (IMAGES / "requirements").iterdir()}
    assert files == {"build", "constraints", *EXTRAS}
    together = [item for name in ("build", *EXTRAS) for item in pinned(name).items()]
    of_torch = {name for name in pinned("constraints") if OF_TORCH.match(f"{name}==")}
    assert {"torch", "triton", "cuda-toolkit", "nvidia-cudnn-cu13"} <= of_torch
    assert dict(together) == {name: version for name, version in pinned("constraints").items() if name not in of_torch}
    assert len(set(together)) == len(dict(together))
    assert {installed_from(service) for service in SERVICES} == set(EXTRAS)


def test_the_build_context_holds_what_is_copied_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for service in SERVICES
        for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile(service), flags=re.MULTILINE)
        for source in line.split()[:-1]
    }
    covered = {str(path) for source in copied for path in (Path(source), *Path(source).parents)}
    assert allowed <= covered, "nothing of it is copied"
    assert all(allowed & {str(path) for path in (Path(source), *Path(source).parents)} for source in copied)
