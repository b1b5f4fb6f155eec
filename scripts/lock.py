"""Write the versions of what the images install to deploy/images/requirements: ``make lock``.

Versions that are there and still fit pyproject.toml are kept; ``make lock UPGRADE=1`` takes the newest.

``constraints.txt`` has all packages of all images, with torch and CUDA, so that they fit together and the images agree. Each
other file is what an image installs, with the digests of the packages. Torch and CUDA are in constraints.txt only: which build
of torch is taken, and from which index, is an argument of an image's build, and each build has its own digest.
"""
# ruff: noqa: S603 - a script that runs a program

import argparse
import re
import subprocess
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

UV = "uv==0.13.9"
ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / "build" / "lock"
REQUIREMENTS = ROOT / "deploy" / "images" / "requirements"
EXTRAS = {
    "gateway": ("gateway", "telemetry"),
    "pool_manager": ("cli", "kubernetes", "plan", "redis", "service", "telemetry"),
    "router": ("cli", "router", "telemetry"),
    "instance": ("cli", "encoder", "telemetry", "text", "ucx"),
}
"""The extras of pyproject.toml that each file has. Encoders and text instances install the same."""
OF_TORCH = re.compile(r"^(?:torch|triton|(?:cuda|nvidia)-[\w-]+)(?===)", re.MULTILINE)
"""Torch, and what its builds for GPUs alone need."""
_PLATFORM = ("--python-version=3.11", "--python-platform=x86_64-unknown-linux-gnu")


def resolve(name: str, *options: str | Path, requirements: str = "") -> None:
    """Write ``name``.txt, for the Python and the platform of the images."""
    to = ("--output-file", REQUIREMENTS / f"{name}.txt", "--custom-compile-command=make lock")
    command = (ENVIRONMENT / "bin" / "uv", "pip", "compile", "--quiet", *_PLATFORM, *to, *options, "-")
    subprocess.run(command, cwd=ROOT, input=requirements, text=True, check=True)


def lock(torch: str, *, upgrade: bool) -> None:
    builds = "\n".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])
    everything = sorted({extra for extras in EXTRAS.values() for extra in extras})
    newest = ("--upgrade",) if upgrade else ()
    resolve("constraints", "pyproject.toml", *_extras(everything), *newest, requirements=f"{torch}\n{builds}")

    constraints = REQUIREMENTS / "constraints.txt"
    left_out = [f"--no-emit-package={name}" for name in OF_TORCH.findall(constraints.read_text())]
    same: tuple[str | Path, ...] = (
        "--constraint",
        constraints,
        "--upgrade",
        "--generate-hashes",
        "--no-annotate",
        *left_out,
    )
    resolve("build", *same, requirements=builds)
    for name, extras in EXTRAS.items():
        resolve(name, "pyproject.toml", *_extras(extras), *same)


def _extras(names: Sequence[str]) -> list[str]:
    return [f"--extra={name}" for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the versions of what the images install.")
    parser.add_argument("--torch", required=True, help="the requirement of torch, such as torch==2.13.0")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that pyproject.toml allows")
    arguments = parser.parse_args()
    if not (ENVIRONMENT / "bin" / "uv").exists():
        venv.create(ENVIRONMENT, with_pip=True)
    subprocess.run((ENVIRONMENT / "bin" / "pip", "install", "--quiet", UV), check=True)
    REQUIREMENTS.mkdir(exist_ok=True)
    lock(arguments.torch, upgrade=arguments.upgrade)


if __name__ == "__main__":
    main()
