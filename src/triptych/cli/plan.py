"""The processes of a cluster: their ports, flags and environment. Nothing is started here."""

import contextlib
import importlib.util
import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from triptych.cli import ports
from triptych.cli.model import Model
from triptych.cli.outcome import ClusterError
from triptych.domain.stage import Role

ENGINES = ("encoder", "text")
MANAGER = "pool-manager"
"""The name of the pool manager's process."""
_LOOPBACK_DEVICE = "lo"


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """A process to start. ``options`` are the user's flags beside the service's own."""

    name: str
    service: str
    port: int
    arguments: tuple[str, ...]
    options: tuple[str, ...]
    admin_port: int = 0
    role: Role | None = None
    """The stages it serves; None for the others."""

    def command(self, drain_s: float) -> list[str]:
        """The module to run, and its command line. Raises ClusterError when the service is not installed."""
        listen = ("--host", ports.HOST, "--port", str(self.port), "--admin-port", str(self.admin_port))
        return [package_of(self.service), *self.arguments, *listen, "--drain-s", f"{drain_s:g}", *self.options]

    def environment(self) -> dict[str, str]:
        """This process's environment, with UCX restricted to the loopback device.

        By default UCX listens on every interface. The operator's settings are kept, and nothing is restricted when the
        options choose another address.
        """
        environment = dict(os.environ)  # noqa: TID251 - passed to the child
        if not any(option.split("=")[0] in ("--host", "--advertise-host") for option in self.options):
            environment.setdefault("UCX_NET_DEVICES", _LOOPBACK_DEVICE)
        return environment


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """All processes in start order. ``mounts_router``: the router's port is in the gateway's process."""

    processes: tuple[ProcessPlan, ...]
    router_port: int
    mounts_router: bool

    @classmethod
    def made(
        cls,
        model: Model,
        *,
        encoders: int,
        text: int,
        hybrid: int,
        port: int,
        router_port: int,
        admin_port: int,
        mount_router: bool,
        threads: int,
        options: Mapping[str, Sequence[str]],
    ) -> Self:
        """From the arguments of ``LocalCluster``; port 0 chooses a free one. Raises ClusterError."""
        if not (encoders or hybrid) or not (text or hybrid):
            raise ClusterError("--encoders 0 and --text 0 need --hybrid: every stage needs a process")
        processes = encoders + text + hybrid + 3
        asked_for = {port, router_port, *range(admin_port, admin_port + processes)}
        *engine_ports, manager_port, free_router_port, free_port = ports.free(processes, asked_for)
        router_port = router_port or free_router_port
        roles = [*[Role.E] * encoders, *[Role.PD] * text, *[Role.EPD] * hybrid]
        manager = ProcessPlan(MANAGER, "pool_manager", manager_port, (), tuple(options.get("pool_manager", ())))
        at = ports.address(manager_port)
        engines = _engines(model, list(zip(roles, engine_ports, strict=True)), at, threads, options)
        front = _front(model, at, port or free_port, router_port, options, mount_router=mount_router)
        others = {*engine_ports, manager_port, free_router_port, free_port, *asked_for}
        return cls(_with_admin_ports((manager, *engines, *front), admin_port, others), router_port, mount_router)

    def wanted_ports(self) -> Iterator[ports.Wanted]:
        """Every port to listen on; those chosen by flags first."""
        flags = {"gateway": "--port", "router": "--router-port"}
        for plan in front_first(self.processes):
            yield ports.Wanted(plan.port, _the(plan), flags.get(plan.service, ""))
        if self.mounts_router:
            yield ports.Wanted(self.router_port, "the router", flags["router"])
        for plan in front_first(self.processes):
            yield ports.Wanted(plan.admin_port, f"the admin port of {_the(plan)}", "--admin-port")


_NAMES = {Role.E: ("encoder", "encoder"), Role.PD: ("text", "text"), Role.EPD: ("hybrid", "text")}
"""By role: the instance's name prefix and its service."""


def engine(
    model: Model,
    role: Role,
    name: str,
    port: int,
    *,
    manager: str,
    threads: int,
    options: Mapping[str, Sequence[str]],
    admin_port: int = 0,
) -> ProcessPlan:
    """An instance, which registers with the pool manager at the address ``manager``."""
    _, service = _NAMES[role]
    shared = ("--model", str(model.path), "--model-id", model.model_id, "--torch-threads", str(threads))
    told = ("--role", role.value) if role is Role.EPD else ()
    own = ("--instance-id", name, "--pool-manager", manager, *shared, *told)
    return ProcessPlan(name, service, port, own, tuple(options.get(service, ())), admin_port, role)


def name_pattern(role: Role) -> str:
    """The names of instances of a role, with ``{}`` for their number."""
    return f"{_NAMES[role][0]}-{{}}"


def _engines(
    model: Model,
    instances: Sequence[tuple[Role, int]],
    manager: str,
    threads: int,
    options: Mapping[str, Sequence[str]],
) -> tuple[ProcessPlan, ...]:
    """``instances`` are pairs of role and port."""
    numbers: Counter[Role] = Counter()

    def planned(role: Role, port: int) -> ProcessPlan:
        numbers[role] += 1
        name = name_pattern(role).format(numbers[role])
        return engine(model, role, name, port, manager=manager, threads=threads, options=options)

    return tuple(planned(role, port) for role, port in instances)


def _front(
    model: Model,
    manager: str,
    port: int,
    router_port: int,
    options: Mapping[str, Sequence[str]],
    *,
    mount_router: bool,
) -> tuple[ProcessPlan, ...]:
    """The router and the gateway, or a gateway with a router in it."""
    named = ("--instance-id", "router", "--model", str(model.path), "--model-id", model.model_id)
    router = (*named, "--pool-manager", manager)
    router_options, gateway_options = tuple(options.get("router", ())), tuple(options.get("gateway", ()))
    if mount_router:
        own = ("--host", ports.HOST, "--port", str(router_port), *router_options)
        mount = (f"--mount-router={shlex.join((*router, *own))}",)
        return (ProcessPlan("gateway", "gateway", port, mount, gateway_options),)
    return (
        ProcessPlan("router", "router", router_port, router, router_options),
        ProcessPlan("gateway", "gateway", port, ("--router", ports.address(router_port)), gateway_options),
    )


def front_first(plans: Iterable[ProcessPlan]) -> list[ProcessPlan]:
    """In display order: gateway, router, pool manager, instances."""
    plans = list(plans)
    engines = [plan for plan in plans if plan.service in ENGINES]
    return [*(plan for plan in reversed(plans) if plan.service not in ENGINES), *engines]


def _with_admin_ports(plans: Sequence[ProcessPlan], first: int, others: Collection[int]) -> tuple[ProcessPlan, ...]:
    """Assign consecutive admin ports from ``first``, or free ones not in ``others`` when it is 0. Raises ClusterError."""
    if first + len(plans) - 1 > ports.MAX_PORT:
        raise ClusterError(f"--admin-port {first}: {len(plans)} processes need as many consecutive ports")
    chosen = range(first, first + len(plans)) if first else ports.free(len(plans), others)
    admin_ports = {plan.name: port for plan, port in zip(front_first(plans), chosen, strict=True)}
    return tuple(replace(plan, admin_port=admin_ports[plan.name]) for plan in plans)


def _the(plan: ProcessPlan) -> str:
    return f"the {plan.name}" if plan.name == plan.service else plan.name


def package_of(service: str) -> str:
    """A service's package: ``triptych.services`` in the wheel, ``services`` in a checkout."""
    for module in (f"triptych.services.{service}", f"services.{service}"):
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(module) is not None:
                return module
    raise ClusterError(f"the {service} service is not installed here")
