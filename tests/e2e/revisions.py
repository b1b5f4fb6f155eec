"""Services of another revision of this repository, run as processes of their own beside this one's."""

import asyncio
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from triptych.cli import ports
from triptych.demo import MODEL_DIR, MODEL_ID

ROOT = Path(__file__).parents[2]
BEFORE = "fc17584dd6adaff621a56771ecbf7175f148f4c5"
"""The revision that this one is promised to work beside (docs/operations.md#upgrades). Each release names the one before it."""
STARTED_WITHIN_S = 300.0
ENDED_WITHIN_S = 300.0
"""Longer than the longest time to drain that a test sets."""


@dataclass(frozen=True)
class Tree:
    """The sources of a revision. Its processes have this environment's interpreter and packages."""

    name: str
    root: Path

    def python(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        """PYTHONPATH comes before the editable installation of this revision. ``tests`` are modules under the root."""
        return {**os.environ, "PYTHONPATH": f"{self.root / 'src'}:{self.root}"}  # noqa: TID251 - a child gets all of it

    def run(self, code: str) -> str:
        """What the code prints. Raises CalledProcessError."""
        command = self.python("-c", code)
        done = subprocess.run(command, cwd=self.root, env=self.environment, check=True, capture_output=True, text=True)
        return done.stdout.strip()


THIS = Tree("this", ROOT)


def before(directory: Path) -> Tree:
    """The sources of ``BEFORE``, written to a directory. Skips the test where this clone lacks them."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--format=tar", BEFORE, "src", "services"], capture_output=True, check=False
    )
    if archive.returncode != 0:
        pytest.skip(
            f"upgrades were NOT tested: revision {BEFORE[:12]} is not in this clone (git fetch --unshallow brings it): "
            f"{archive.stderr.decode().strip()}"
        )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(directory, filter="data")
    tree = Tree("before", directory)
    where = tree.run("import triptych.services; print(*triptych.services.__path__)")
    assert where == str(directory / "src" / "triptych" / "services"), where
    return tree


def settings_of(kind: str, name: str, manager: str = "") -> tuple[str, ...]:
    """The flags of a process of the demo model that registers with the pool manager at an address, or takes its routers from it."""
    follow = ("--pool-manager", manager) if manager else ()
    member = ("--instance-id", name, "--model", str(MODEL_DIR), "--model-id", MODEL_ID)
    told = {"router": member, "encoder": (*member, "--torch-threads", "1"), "text": (*member, "--torch-threads", "1")}
    return (*told.get(kind, ()), *follow)


@dataclass
class Service:
    """A process of a service; ``name`` is also its instance id."""

    kind: str
    name: str
    tree: Tree
    port: int
    admin_port: int
    process: asyncio.subprocess.Process

    @property
    def target(self) -> str:
        return ports.address(self.port)

    async def until_ready(self) -> None:
        async with asyncio.timeout(STARTED_WITHIN_S), httpx.AsyncClient(trust_env=False) as http:
            while True:
                assert self.process.returncode is None, f"{self.name} ended with status {self.process.returncode}"
                try:
                    said = (await http.get(f"http://{ports.address(self.admin_port)}/ready")).json()
                    if said["pid"] == self.process.pid and not said["missing"]:
                        return
                except (httpx.HTTPError, ValueError, KeyError):
                    pass
                await asyncio.sleep(0.1)

    async def end(self) -> None:
        """Let it drain and end, which must succeed."""
        self.process.terminate()
        async with asyncio.timeout(ENDED_WITHIN_S):
            assert await self.process.wait() == 0, f"{self.name} ended with status {self.process.returncode}"


@dataclass
class Processes:
    """Services of several trees. Those that still run are killed when the context of ``running`` is left."""

    logs: Path
    started: list[Service] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def running(cls, logs: Path) -> AsyncIterator["Processes"]:
        processes = cls(logs)
        try:
            yield processes
        finally:
            for service in processes.started:
                if service.process.returncode is None:
                    service.process.kill()
                await service.process.wait()

    async def start(
        self, kind: str, name: str, tree: Tree, *arguments: str, port: int = 0, module: str = ""
    ) -> Service:
        """Returns at once; ``Service.until_ready`` waits for it. ``module`` is run instead of the service's."""
        admin_port, free = ports.free(2, self._taken | {port})
        port = port or free
        run = ("-m", "triptych.cli.child", str(os.getpid()), module or f"triptych.services.{kind}")
        listen = ("--port", str(port), "--admin-port", str(admin_port))
        with (self.logs / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *tree.python(*run, *arguments, *listen),
                cwd=tree.root,
                env=tree.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        service = Service(kind, name, tree, port, admin_port, process)
        self.started.append(service)
        return service

    @property
    def _taken(self) -> set[int]:
        return {port for service in self.started for port in (service.port, service.admin_port)}

    def faults(self) -> Mapping[str, list[str]]:
        """Lines of errors and stacks in the logs, by process."""
        found = {
            path.stem: [line for line in path.read_text().splitlines() if " ERROR " in line or "Traceback" in line]
            for path in self.logs.glob("*.log")
        }
        return {name: lines for name, lines in found.items() if lines}
