"""A cluster of real processes on this machine: a gateway, routers, a pool manager, encoders and text instances."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self, Unpack

import httpx

from triptych.cli import ports
from triptych.cli.child import child_command
from triptych.cli.model import Model
from triptych.cli.outcome import CliError, ClusterError
from triptych.cli.process_plan import (
    ENGINES,
    MANAGER,
    ClusterPlan,
    ClusterShape,
    ProcessPlan,
    engine,
    front_first,
    name_pattern,
    with_gpus,
)
from triptych.cli.service_options import loaded
from triptych.cli.tiers import NO_TIERS, Tiers
from triptych.domain.reasons import shown
from triptych.domain.scaling import Kind, ProcessPhase
from triptych.domain.stage import Role
from triptych.errors import InvalidRequest, Unavailable
from triptych.machine.process_pool_events import ProcessEnded
from triptych.machine.process_pools import RestartRules
from triptych.machine.router_attempts import RETURN_S
from triptych.policy.consequences import without
from triptych.rpc.scaler import SERVICE_NAME, ScalerServicer
from triptych.rpc.server import RpcServer
from triptych.runtime.admin import STARTING
from triptych.runtime.clock import monotonic
from triptych.runtime.tasks import TaskScope
from triptych.scaling.processes import Done, ProcessScaler

_STOP_ORDER = (("gateway",), ("router",), ENGINES, ("pool_manager",))
"""Senders of requests stop first, so that running requests can end."""
_READY_POLL_S = 0.2
_READY_ANSWER_S = 5.0
_KILL_MARGIN_S = 4.0
"""Time after the drain for processes to close."""
_LOG_TAIL_LINES = 12
_LOG_TAIL_NBYTES = 1 << 16
_ANSWERED = 'triptych_rpc_server_seconds_count{{code="OK",method="{}"}}'
"""Line of an instance's metrics that exists once a call of this method has succeeded."""
_MAX_PROCESSES = 1024
_NO_OPTIONS: Mapping[str, Sequence[str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Exit:
    """A process that ended unexpectedly. A negative ``code`` is the signal that killed it."""

    plan: ProcessPlan
    code: int
    reason: str = ""
    """Last line of the process's log; empty if it wrote none."""

    @property
    def name(self) -> str:
        return self.plan.name

    def __str__(self) -> str:
        if self.code < 0:
            return f"{self.name} was killed by {signal.Signals(-self.code).name}"
        why = f": {self.reason}" if self.reason else ""
        return f"{self.name} ended with status {self.code}{why}"


Event = Exit | Done | ProcessEnded
"""The last is of a process that was told to end."""


@dataclass(slots=True)
class _Child:
    plan: ProcessPlan
    process: asyncio.subprocess.Process
    logs_from: int
    """Offset at which its log begins in the file. Earlier processes wrote what comes before."""


class LocalCluster:
    """Set of processes, ready when the context is entered and gone when it is left.

    ``model`` is one or several. Each gets the same numbers of instances, and a router of its own. There is one gateway.
    ``shape`` has the numbers of instances and the ports. ``options`` are further flags by service
    (``{"encoder": ("--transports", "tcp")}``). ``tiers`` describe the tiers of ``roles``. ``threads`` bounds the compute threads of each torch process. Children
    die with this process, however it ends.

    With ``restart`` a process that ends is started again on the same ports, with growing pauses. That stops after three
    crashes in a row while starting, or six ends in a row without an answer. ``scaler`` changes the numbers of
    instances. It is served to the pool manager on a loopback port. The manager orders the sizes that were set by hand
    (``triptych scale``), and with ``autoscale`` those that it decides.

    Foreign processes are never mistaken for the cluster's. Ports are checked before anything starts, and a process
    counts as ready when its own admin port reports the pid that was started here.
    """

    def __init__(
        self,
        model: str | Path | Sequence[str | Path | Model] = "demo",
        *,
        threads: int = 1,
        options: Mapping[str, Sequence[str]] = _NO_OPTIONS,
        log_dir: Path | None = None,
        start_timeout_s: float = 300.0,
        drain_s: float = 10.0,
        restart: bool = False,
        autoscale: bool = False,
        first_backoff_s: float = 1.0,
        tiers: Tiers = NO_TIERS,
        **shape: Unpack[ClusterShape],
    ) -> None:
        """Raises ClusterError when ``model`` is not a model, or ports are not available."""
        models = Model.all_named([model] if isinstance(model, str | Path) else model)
        self._threads = threads
        self._options = options
        self._plan = ClusterPlan.make(
            models,
            scaled=restart or autoscale,
            autoscale=autoscale,
            threads=threads,
            options=options,
            tiers=tiers,
            **shape,
        )
        self._start_timeout_s = start_timeout_s
        self._drain_s = drain_s
        self.on_start: Callable[[], None] = lambda: None
        """Called when all ports are known to be free, before the first process starts; set before entering the context.
        """
        self.on_ready: Callable[[str], None] = lambda _: None
        """Called with the name of each process that becomes ready; set before entering the context."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a process was started again, or has ended for good; set before entering the context."""
        self._plans = {plan.name: plan for plan in self._plan.processes}
        self._children: dict[str, _Child] = {}
        self._server = contextlib.AsyncExitStack()
        self._pools = {
            pool: (plan.model, Kind(plan.role, plan.tier))
            for plan in self._plan.processes
            if plan.model is not None and plan.role is not None and (pool := plan.pool) is not None
        }
        self.scaler = ProcessScaler(
            self,
            scaled={pool: name_pattern(*model_and_kind) for pool, model_and_kind in self._pools.items()},
            others={plan.name: plan.name for plan in self._plan.processes if plan.role is None},
            rules=RestartRules(
                first_backoff_s=first_backoff_s, start_timeout_s=start_timeout_s, grace_s=drain_s + _KILL_MARGIN_S
            ),
            clock=monotonic,
        )
        """Starts and stops instances of the pools that began with some, if the cluster restarts processes."""
        self._watchers = TaskScope("cluster", limit=_MAX_PROCESSES)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._stopping = False
        self._kept = False
        self._failed = False
        self._owns_log_dir = log_dir is None
        self._log_dir = log_dir

    # --- what it is ---

    @property
    def url(self) -> str:
        return f"http://{self.targets['gateway']}"

    @property
    def router_target(self) -> str:
        """``host:port`` of the gRPC of the router, of the first model's where there are several."""
        return next(iter(self.router_targets.values()))

    @property
    def router_targets(self) -> Mapping[str, str]:
        """``host:port`` of the gRPC of each model's router, by the model's name."""
        return {model: ports.address(port) for model, port in self._plan.router_ports.items()}

    @property
    def manager_target(self) -> str:
        """``host:port`` of the pool manager's gRPC."""
        return self.targets[MANAGER]

    @property
    def processes(self) -> Mapping[str, int]:
        """Pids of the running processes by name (``encoder-1``)."""
        return {name: child.process.pid for name, child in self._children.items() if child.process.returncode is None}

    @property
    def overridden_variables(self) -> tuple[str, ...]:
        """A line for each setting in the environment that has no effect here."""
        return self._plan.overridden_variables(self._drain_s)

    @property
    def vital(self) -> frozenset[str]:
        """Names of the processes without which no model is served."""
        routers = [plan.name for plan in self._plan.processes if plan.service == "router"]
        return frozenset({"gateway", *routers} if len(routers) == 1 else {"gateway"})

    def consequence(self, ended: Exit) -> str:
        """One line on what no longer works after the last process of a kind ended; empty while others are ready."""
        if ended.name == MANAGER:
            return "requests go on; instances that start or leave are noticed when it is back"
        plan = ended.plan
        of_model = f" for {plan.model.model_id}" if plan.model is not None and plan.model.prefix else ""
        if plan.service == "router":
            running = f"answers that have begun pause, and go on if it is within {RETURN_S:g} s"
            return f"new requests{of_model} fail until the {ended.name} is back; {running}"
        if plan.role is None:
            return f"requests fail until the {ended.name} is back"
        left = [
            process
            for name in self.processes
            if (process := self._plans[name]).model == plan.model and process.role is not None and self._is_ready(name)
        ]
        if left and self._plan.switches_roles:
            return ""  # they may serve other stages than at first
        served = {stage for process in left if process.role is not None for stage in process.role.stages}
        lost = without(plan.role.stages - served, of_model)
        return "" if lost is None else f"that was the last {lost[0]}: {lost[1]} until there is one"

    @property
    def targets(self) -> Mapping[str, str]:
        """``host:port`` of every process, by name."""
        return {plan.name: ports.address(plan.port) for plan in self._listed}

    @property
    def admin_urls(self) -> Mapping[str, str]:
        """Base URL of each process's admin port (``/health``, ``/ready``, ``/metrics``) by name, the gateway's first."""
        return {plan.name: f"http://{ports.address(plan.admin_port)}" for plan in front_first(self._listed)}

    @property
    def log_dir(self) -> Path:
        """Directory of the logs, NAME.log. Exists while the cluster runs, and longer if a process failed."""
        if self._log_dir is None:
            self._log_dir = Path(tempfile.mkdtemp(prefix="triptych-"))
        return self._log_dir

    @property
    def kept_logs(self) -> Path | None:
        """Directory of the logs after the end; None unless a process failed."""
        return self._log_dir if self._failed and self._log_dir is not None and self._log_dir.is_dir() else None

    def log_tail(self, name: str) -> str:
        """The last lines of a process's log."""
        with contextlib.suppress(OSError):
            lines = (self.log_dir / f"{name}.log").read_text(errors="replace").splitlines()
            return "\n".join(lines[-_LOG_TAIL_LINES:])
        return ""

    # --- what it does ---

    def kill(self, process: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one process, if it runs."""
        if (child := self._children.get(process)) is not None:
            _signal(child.process, number)

    def terminate(self, process: str) -> None:
        """Ask one process to finish what runs and to end."""
        self.kill(process, signal.SIGTERM)

    async def next_event(self) -> Event:
        """Wait until a process ends unexpectedly, or something is done about processes."""
        return await self._events.get()

    async def next_exit(self) -> Exit:
        """Wait until a process ends unexpectedly."""
        while not isinstance(event := await self.next_event(), Exit):
            pass
        return event

    async def __aenter__(self) -> Self:
        ports.refuse_taken(self._plan.wanted_ports())
        self.on_start()
        try:
            try:
                self.log_dir.mkdir(parents=True, exist_ok=True)
                if self._plan.scaler_port is not None:
                    await self._serve_scaler(self._plan.scaler_port)
                for plan in self._plan.processes:
                    await self._start(plan)
            except OSError as error:
                raise ClusterError(f"cannot start {error.filename or 'a process'}: {error.strerror}") from None
            await self._until_ready()
            if self._plan.scaler_port is not None:
                self._keep()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop in order, with time for each process to drain; kill those that have not ended by then."""
        self._stopping = True
        await self._server.aclose()
        await self.scaler.close()
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
            if self._owns_log_dir and self._log_dir is not None and self.kept_logs is None:
                shutil.rmtree(self._log_dir, ignore_errors=True)

    def kill_all(self) -> None:
        """Kill all running processes."""
        self._stopping = True
        for child in self._children.values():
            _signal(child.process, signal.SIGKILL)

    # --- how ---

    async def _start(self, plan: ProcessPlan) -> None:
        command = child_command(*plan.command(self._drain_s))
        with (self.log_dir / f"{plan.name}.log").open("ab") as log:
            logs_from = log.seek(0, os.SEEK_END)
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=plan.environment(),
                start_new_session=True,  # Ctrl-C goes to the parent only, which stops the children in order
            )
        self._children[plan.name] = _Child(plan, process, logs_from)
        self._watchers.spawn(self._watch(plan, process), name=plan.name)

    async def _serve_scaler(self, port: int) -> None:
        """Raises ClusterError."""
        register = ScalerServicer(self.scaler).register
        server = RpcServer(host=ports.HOST, port=port, service_names=(SERVICE_NAME,), register=register)
        try:
            await self._server.enter_async_context(server)
        except Unavailable as error:
            raise ClusterError(f"the scaler: {error.message}") from None

    def _keep(self) -> None:
        """Start again what ends, from now on."""
        pools: dict[str, list[str]] = {}
        for plan in self._plans.values():
            pools.setdefault(str(plan.pool or plan.name), []).append(plan.name)
        for pool, names in pools.items():
            self.scaler.adopt(pool, names)
        self._kept = True
        for name, child in self._children.items():
            if child.process.returncode is not None:  # between ready and now
                self.scaler.ended(name, "it ended")
        self.scaler.on_event = self._events.put_nowait
        self._watchers.spawn(self.scaler.run(), name="scaler")

    async def start(self, pool: str, process: str) -> None:
        """Start a process of a pool: again, or a new instance on free ports. Raises Unavailable or OSError."""
        try:
            if process not in self._plans:
                self._plans = {plan.name: plan for plan in self._listed} | {process: self._another(pool, process)}
                self._children = {name: child for name, child in self._children.items() if name in self._plans}
            await self._start(self._plans[process])
        except ClusterError as error:
            raise Unavailable(str(error)) from None
        self.on_change()

    def _another(self, pool: str, process: str) -> ProcessPlan:
        """A new instance of a pool."""
        model, kind = next(model_and_kind for name, model_and_kind in self._pools.items() if str(name) == pool)
        taken = {port for plan in self._plans.values() for port in (plan.port, plan.admin_port)}
        port, admin_port = ports.free(2, taken)
        another = engine(
            model,
            kind,
            process,
            port,
            manager=self.manager_target,
            threads=self._threads,
            options=self._options,
            switches=self._plan.switches_roles,
            admin_port=admin_port,
            tier=self._plan.tiers.get(kind),
            degree=self.scaler.degree(pool),
        )
        return with_gpus([another], self._plan.tiers, self._listed)[0]

    def check_degree(self, pool: str, degree: int) -> None:
        """Raises InvalidRequest if new instances of a pool cannot have this tensor-parallel degree."""
        running = next(plan for plan in self._listed if str(plan.pool) == pool)
        if running.gpus and len(running.gpus.split(",")) != degree:
            raise InvalidRequest(
                f"instances of pool {pool} have GPUs {running.gpus} each, not {degree}", param="degree"
            )
        try:
            loaded(running.service, (*running.arguments, *running.options, f"--tensor-parallel={degree}"))
        except CliError as error:
            raise InvalidRequest(str(error), param="degree") from None

    async def _watch(self, plan: ProcessPlan, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._stopping:
            return
        ended = Exit(plan, code, self._last_words(plan) if code > 0 else "")
        expected = self._kept and self.scaler.phase(plan.name) is ProcessPhase.STOPPING
        if self._kept:
            self.scaler.ended(plan.name, str(ended))
        if expected:
            self._events.put_nowait(ProcessEnded(plan.name, str(ended)))
        else:
            self._failed |= code != 0 or not self._kept  # what has drained is ended by its operator, with status 0
            self._events.put_nowait(ended)
        self.on_change()

    def _last_words(self, plan: ProcessPlan) -> str:
        """The reason that a process of services gives as its last line (``runtime.process``)."""
        prefix = f"{plan.service}: "
        with contextlib.suppress(OSError), (self.log_dir / f"{plan.name}.log").open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._children[plan.name].logs_from, end - _LOG_TAIL_NBYTES))
            lines = log.read(_LOG_TAIL_NBYTES).decode(errors="replace").splitlines()
            line = next((line for line in reversed(lines) if line.startswith(prefix)), "")
            return shown(line.removeprefix(prefix))
        return ""

    def _is_ready(self, name: str) -> bool:
        """Whether a running process has started and was not told to end."""
        return not self._kept or self.scaler.phase(name) is ProcessPhase.RUNNING

    @property
    def _listed(self) -> list[ProcessPlan]:
        """The processes that run or will be started again."""
        if not self._kept:
            return list(self._plans.values())
        return [plan for name, plan in self._plans.items() if self.scaler.phase(name) is not None]

    async def serves(self, processes: Sequence[str]) -> list[str]:
        """Names of the processes that have finished starting."""
        if not processes:
            return []
        async with httpx.AsyncClient(trust_env=False) as client:
            serving = await asyncio.gather(*(self._serves(client, name) for name in processes))
        return [name for name, serves in zip(processes, serving, strict=True) if serves]

    async def _serves(self, client: httpx.AsyncClient, name: str) -> bool:
        try:
            body = (await client.get(f"{self.admin_urls[name]}/ready", timeout=_READY_ANSWER_S)).json()
            return body["pid"] == self._children[name].process.pid and STARTING not in body["missing"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False

    async def answered(self, processes: Sequence[str]) -> list[str]:
        """Names of the processes that have encoded or answered something. Processes without an engine count: they do
        not end by a request.
        """
        engines = [name for name in processes if self._plans[name].service in ENGINES]
        answering = set(processes) - set(engines)
        if engines:
            async with httpx.AsyncClient(trust_env=False) as client:
                answers = await asyncio.gather(*(self._has_answered(client, name) for name in engines))
            answering |= {name for name, answered in zip(engines, answers, strict=True) if answered}
        return [name for name in processes if name in answering]

    async def _has_answered(self, client: httpx.AsyncClient, name: str) -> bool:
        """Whether a call has succeeded that ran the last stage of the process. An instance with several stages may end
        by the later one. Where roles switch, any stage may be the last.
        """
        encodes = self._plans[name].role is Role.E
        methods = ["Encoder/Encode"] if encodes or self._plan.switches_roles else []
        methods += ["Text/Generate"] if not encodes or self._plan.switches_roles else []
        try:
            text = (await client.get(f"{self.admin_urls[name]}/metrics", timeout=_READY_ANSWER_S)).text
        except httpx.HTTPError:
            return False
        return any(_ANSWERED.format(method) in text for method in methods)

    async def _until_ready(self) -> None:
        waiting = {plan.name: "it does not answer" for plan in self._plan.processes}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._start_timeout_s), httpx.AsyncClient(trust_env=False) as client:
                while True:
                    if not self._events.empty():
                        ended = await self.next_exit()
                        raise ClusterError(
                            f"{ended} while starting; logs are in {self.log_dir}\n{self.log_tail(ended.name)}"
                        )
                    for name in list(waiting):
                        absent = await self._missing(client, name)
                        if absent:
                            waiting[name] = absent
                        else:
                            del waiting[name]
                            self.on_ready(name)
                    if not waiting:
                        return
                    await asyncio.sleep(_READY_POLL_S)
        self._failed = True
        lacking = "; ".join(f"{name}: {absent}" for name, absent in waiting.items())
        raise ClusterError(f"not ready after {self._start_timeout_s:g} s; {lacking}; logs are in {self.log_dir}")

    async def _missing(self, client: httpx.AsyncClient, name: str) -> str:
        """Facts that a process lacks to be ready; empty when it is. Only the pid that was started here counts. Raises
        ClusterError when another process has its admin port.
        """
        try:
            answer = await client.get(f"{self.admin_urls[name]}/ready", timeout=_READY_ANSWER_S)
            body = answer.json()
            if body["pid"] != self._children[name].process.pid:
                raise ClusterError(f"another process answers at {self.admin_urls[name]}, the admin port of {name}")
            if body["missing"]:
                return f"missing: {', '.join(body['missing'])}"
            if name != "gateway":
                return ""
            seen = (await client.get(f"{self.admin_urls[name]}/instances", timeout=_READY_ANSWER_S)).json()
            engines = {plan.name for plan in self._plan.processes if plan.service in ENGINES}
            ready = {line.removesuffix(": ready") for line in seen if line.endswith(": ready")}
        except httpx.HTTPError:
            return "it does not answer"
        except (ValueError, KeyError, TypeError, AttributeError):
            return "something else answers on its port"
        return f"missing: {', '.join(sorted(engines - ready))}" if engines - ready else ""


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
