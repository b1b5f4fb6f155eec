"""A cluster of real processes on this machine: one gateway, one router, encoders and text instances."""

import asyncio
import contextlib
import importlib.util
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import httpx

from triptych import demo
from triptych.runtime.tasks import TaskScope

HOST = "127.0.0.1"
_STOP_ORDER = (("gateway",), ("router",), ("text", "encoder"))
"""Whoever sends requests goes first, so that those on their way can end."""
_PORTS = range(20_000, 32_000)
"""Below the ports that the kernel hands out by itself, so that none is taken between choosing and listening."""
_READY_POLL_S = 0.1
_KILL_MARGIN_S = 4.0
"""After the drain has had its time, for processes to close what they hold."""
_LOG_TAIL_LINES = 12
_NO_OPTIONS: Mapping[str, Sequence[str]] = MappingProxyType({})


class ClusterError(Exception):
    """The cluster did not come up; the message names the process and shows the end of its log."""


@dataclass(frozen=True, slots=True)
class Exit:
    """A process that ended though nobody told it to. A negative ``code`` is the signal that killed it."""

    name: str
    service: str
    code: int

    def __str__(self) -> str:
        if self.code < 0:
            return f"{self.name} was killed by {signal.Signals(-self.code).name}"
        return f"{self.name} ended with status {self.code}"


@dataclass(frozen=True, slots=True)
class Model:
    """A directory with a model, and the name under which it is served."""

    path: Path
    model_id: str

    @classmethod
    def named(cls, model: str | Path) -> Self:
        """``demo`` is the model that comes with the package; anything else is a directory. Raises ClusterError."""
        if model == "demo":
            return cls(demo.MODEL_DIR, demo.MODEL_ID)
        path = Path(model).resolve()
        if not (path / "config.json").is_file():
            raise ClusterError(f"{model} is not a model: there is no config.json in it")
        return cls(path, path.name)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A process to be."""

    name: str
    service: str
    port: int
    admin_port: int
    arguments: tuple[str, ...]


@dataclass(slots=True)
class _Child:
    plan: _Plan
    process: asyncio.subprocess.Process


class LocalCluster:
    """Processes that start together, are ready when the context is entered, and are gone when it is left.

    ``options`` are further flags by service (``{"encoder": ("--transports", "tcp")}``). ``port`` is the gateway's,
    ``router_port`` the router's; 0 takes a free one. With ``mount_router`` the router runs in the gateway's process, where
    its options hold too. ``threads`` bounds what each torch process computes with. Children die with this process, however it ends.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        encoders: int = 2,
        text: int = 1,
        port: int = 0,
        router_port: int = 0,
        mount_router: bool = False,
        threads: int = 1,
        options: Mapping[str, Sequence[str]] = _NO_OPTIONS,
        log_dir: Path | None = None,
        start_timeout_s: float = 120.0,
        drain_s: float = 10.0,
    ) -> None:
        self._model = Model.named(model)
        self._threads = threads
        self._options = options
        self._start_timeout_s = start_timeout_s
        self._drain_s = drain_s
        self._mount_router = mount_router
        self._plans = self._plan(encoders, text, port, router_port)
        self._children: dict[str, _Child] = {}
        self._watchers = TaskScope("cluster", limit=len(self._plans))
        self._exits: asyncio.Queue[Exit] = asyncio.Queue()
        self._stopping = False
        self._failed = False
        self._owns_log_dir = log_dir is None
        self._log_dir = log_dir

    # --- what it is ---

    @property
    def url(self) -> str:
        return f"http://{self._target('gateway')}"

    @property
    def router_target(self) -> str:
        """``host:port`` of the router's gRPC."""
        return _address(self._router_port)

    @property
    def processes(self) -> Mapping[str, int]:
        """The pids of the processes that have not ended, by name (``encoder-1``)."""
        return {name: child.process.pid for name, child in self._children.items() if child.process.returncode is None}

    @property
    def targets(self) -> Mapping[str, str]:
        """``host:port`` of every process, by name."""
        return {plan.name: _address(plan.port) for plan in self._plans}

    @property
    def admin_urls(self) -> Mapping[str, str]:
        """Where each process answers ``/health``, ``/ready`` and ``/metrics`` of its own, by name."""
        return {plan.name: f"http://{_address(plan.admin_port)}" for plan in self._plans}

    @property
    def log_dir(self) -> Path:
        """Where each process writes NAME.log. Exists while the cluster runs, and longer if something failed."""
        if self._log_dir is None:
            self._log_dir = Path(tempfile.mkdtemp(prefix="triptych-"))
        return self._log_dir

    def log_tail(self, name: str) -> str:
        """The last lines that a process wrote."""
        with contextlib.suppress(OSError):
            lines = (self.log_dir / f"{name}.log").read_text(errors="replace").splitlines()
            return "\n".join(lines[-_LOG_TAIL_LINES:])
        return ""

    # --- what it does ---

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one process; nothing restarts it."""
        self._children[name].process.send_signal(number)

    async def next_exit(self) -> Exit:
        """Wait until a process ends that nobody stopped."""
        return await self._exits.get()

    async def __aenter__(self) -> Self:
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            for plan in self._plans:
                await self._start(plan)
            await self._until_ready()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc_type is not None and not issubclass(exc_type, asyncio.CancelledError):
            self._failed = True
        await self.stop()

    async def stop(self) -> None:
        """Stop in order, each process with time to drain; whoever has not ended by then is killed."""
        self._stopping = True
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._drain_s + _KILL_MARGIN_S
        try:
            for services in _STOP_ORDER:
                tier = [child for child in self._children.values() if child.plan.service in services]
                for child in tier:
                    _signal(child.process, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(end_s):
                        for child in tier:
                            await child.process.wait()
        finally:
            self.kill_all()
            for child in self._children.values():
                await child.process.wait()
            await self._watchers.close()
            if self._owns_log_dir and not self._failed and self._log_dir is not None:
                shutil.rmtree(self._log_dir, ignore_errors=True)

    def kill_all(self) -> None:
        """End everything that still runs, at once."""
        self._stopping = True
        for child in self._children.values():
            _signal(child.process, signal.SIGKILL)

    # --- how ---

    def _plan(self, encoders: int, text: int, port: int, router_port: int) -> tuple[_Plan, ...]:
        ports = _free_ports(2 * (encoders + text + 2))
        admin_ports = iter(ports[: len(ports) // 2])
        *engine_ports, free_router_port, free_port = ports[len(ports) // 2 :]
        self._router_port = router_port or free_router_port
        encoder_ports, text_ports = engine_ports[:encoders], engine_ports[encoders:]
        encoder_targets = ("--encoders", ",".join(map(_address, encoder_ports)))
        text_targets = ("--text", ",".join(map(_address, text_ports)))
        model = ("--model", str(self._model.path))
        engine = (*model, "--model-id", self._model.model_id, "--torch-threads", str(self._threads))
        names = [("encoder", number) for number in range(1, encoders + 1)]
        names += [("text", number) for number in range(1, text + 1)]
        engines = (
            _Plan(
                f"{service}-{number}",
                service,
                port,
                next(admin_ports),
                ("--instance-id", f"{service}-{number}", *engine, *(encoder_targets if service == "text" else ())),
            )
            for (service, number), port in zip(names, engine_ports, strict=True)
        )
        router = (*model, *encoder_targets, *text_targets)
        gateway_port = port or free_port
        if self._mount_router:
            own = ("--host", HOST, "--port", str(self._router_port), *self._options.get("router", ()))
            mount = (f"--mount-router={shlex.join((*router, *own))}",)
            return (*engines, _Plan("gateway", "gateway", gateway_port, next(admin_ports), mount))
        return (
            *engines,
            _Plan("router", "router", self._router_port, next(admin_ports), router),
            _Plan("gateway", "gateway", gateway_port, next(admin_ports), ("--router", self.router_target)),
        )

    def _target(self, name: str) -> str:
        return self.targets[name]

    async def _start(self, plan: _Plan) -> None:
        command = [sys.executable, "-m", "triptych.cli.leash", str(os.getpid()), _module(plan.service), *plan.arguments]
        command += [
            "--host",
            HOST,
            "--port",
            str(plan.port),
            "--admin-port",
            str(plan.admin_port),
            "--drain-s",
            f"{self._drain_s:g}",
            *self._options.get(plan.service, ()),
        ]
        with (self.log_dir / f"{plan.name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is for the parent, which stops them in order
            )
        self._children[plan.name] = _Child(plan, process)
        self._watchers.spawn(self._watch(plan, process), name=plan.name)

    async def _watch(self, plan: _Plan, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if not self._stopping:
            self._failed = True
            self._exits.put_nowait(Exit(plan.name, plan.service, code))

    async def _until_ready(self) -> None:
        missing = "the gateway does not answer"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._start_timeout_s), httpx.AsyncClient(trust_env=False) as client:
                while True:
                    if not self._exits.empty():
                        ended = self._exits.get_nowait()
                        raise ClusterError(
                            f"{ended} while starting; logs are in {self.log_dir}\n{self.log_tail(ended.name)}"
                        )
                    with contextlib.suppress(httpx.TransportError):
                        answer = await client.get(f"{self.url}/ready")
                        absent = self._absent(answer)
                        if not absent:
                            return
                        missing = f"missing: {', '.join(absent)}"
                    await asyncio.sleep(_READY_POLL_S)
        raise ClusterError(f"not ready after {self._start_timeout_s:g} s; {missing}; logs are in {self.log_dir}")

    def _absent(self, answer: httpx.Response) -> list[str]:
        """What is not there yet, going by the answer of ``/ready``: the cluster is up when every instance is."""
        body = answer.json()
        engines = [plan.name for plan in self._plans if plan.service in ("encoder", "text")]
        ready = {line.removesuffix(": ready") for line in body["instances"] if line.endswith(": ready")}
        absent = sorted(set(engines) - ready)
        return absent or list(body["missing"])


def _module(service: str) -> str:
    """A service's package: within the wheel ``triptych.services``, in a checkout ``services``."""
    for module in (f"triptych.services.{service}", f"services.{service}"):
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(module) is not None:
                return module
    raise ClusterError(f"the {service} service is not installed here")


def _address(port: int) -> str:
    return f"{HOST}:{port}"


def _free_ports(count: int) -> list[int]:
    """Ports of the loopback address on which nobody listens. Raises ClusterError."""
    found: list[int] = []
    for _ in range(100 * count):
        port = _PORTS.start + secrets.randbelow(len(_PORTS))
        if port in found:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            found.append(port)
        if len(found) == count:
            return found
    raise ClusterError(f"found no {count} free ports between {_PORTS.start} and {_PORTS.stop}")


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
