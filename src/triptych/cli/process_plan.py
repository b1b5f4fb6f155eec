"""The processes of a cluster: their ports, flags and environment. Nothing is started here."""

import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypedDict, Unpack

from triptych.cli import ports
from triptych.cli.model import Model
from triptych.cli.outcome import ClusterError
from triptych.cli.placement import DEFAULT_ROLES, placed_kinds
from triptych.cli.tiers import NO_TIERS, TierPlan, Tiers
from triptych.domain.scaling import Kind, PoolName
from triptych.domain.stage import Role, Stage
from triptych.domain.tier import Tier

ENGINES = ("encoder", "text")
MANAGER = "pool-manager"
"""The name of the pool manager's process."""
_LOOPBACK_DEVICE = "lo"
_TLS = re.compile("TRIPTYCH_(GATEWAY|ROUTER|POOL_MANAGER|ENCODER|TEXT)_(REST_)?TLS_[A-Z]+")


class ClusterShape(TypedDict, total=False):
    """Numbers of a cluster's processes, and their ports; 0 takes a free one."""

    roles: str
    """Instances of each model by role, as ``--roles`` has them: ``E:2,PD:1``, or by role and tier: ``E:1,PD@fast:1,PD@slow:2``."""
    port: int
    """The gateway's."""
    router_port: int
    """The first router's."""
    admin_port: int
    """The first of all admin ports, in the order of ``LocalCluster.admin_urls``."""
    mount_router: bool
    """The router runs in the gateway's process, where its options apply too."""
    switch_roles: bool
    """Instances are switchable, and the pool manager lets them switch as the load needs it."""
    switchable: bool
    """Instances can serve every stage. Encoders are text processes then, with the options of mounted encoders."""


_DEFAULT: ClusterShape = {
    "roles": DEFAULT_ROLES,
    "port": 0,
    "router_port": 0,
    "admin_port": 0,
    "mount_router": False,
    "switch_roles": False,
    "switchable": False,
}


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
    """The stages it serves at first; None for the others."""
    model: Model | None = None
    """Model that the process serves. None for the gateway and the pool manager."""
    tier: str = ""
    """Tier of hardware of an instance; empty without tiers."""
    gpus: str = ""
    """The instance's own, as CUDA_VISIBLE_DEVICES has them; empty for those of this process."""

    @property
    def pool(self) -> PoolName | None:
        """The pool that it is an instance of; None for the others."""
        if self.role is None or self.model is None:
            return None
        return PoolName(self.model.model_id, self.role, self.tier)

    def command(self, drain_s: float) -> list[str]:
        """The module to run, and its command line."""
        listen = ("--host", ports.HOST, "--port", str(self.port), "--admin-port", str(self.admin_port))
        return [package_of(self.service), *self.arguments, *listen, "--drain-s", f"{drain_s:g}", *self.options]

    def environment(self) -> dict[str, str]:
        """Environment of a child: this process's, with UCX restricted to the loopback device.

        By default UCX listens on every interface. The operator's settings are kept. Nothing is restricted when the
        options choose another address.
        """
        environment = dict(os.environ)  # noqa: TID251 - passed to the child
        if not any(option.split("=")[0] in ("--host", "--advertise-host") for option in self.options):
            environment.setdefault("UCX_NET_DEVICES", _LOOPBACK_DEVICE)
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus
        return environment


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Processes of a cluster in start order. ``mounts_router``: the router's port is in the gateway's process."""

    processes: tuple[ProcessPlan, ...]
    router_ports: Mapping[str, int]
    """Routers' ports by model."""
    mounts_router: bool
    switches_roles: bool
    scaler_port: int | None
    """Port of the scaler for the pool manager. None: the cluster has no scaler."""
    tiers: Tiers

    @classmethod
    def make(
        cls,
        models: Sequence[Model],
        *,
        scaled: bool,
        autoscale: bool,
        threads: int,
        options: Mapping[str, Sequence[str]],
        tiers: Tiers = NO_TIERS,
        **shape: Unpack[ClusterShape],
    ) -> Self:
        """Make a plan of the arguments of ``LocalCluster``. Raises ClusterError, and TypeError for an unknown argument."""
        if unknown := shape.keys() - _DEFAULT.keys():
            raise TypeError(f"a cluster has no {', '.join(sorted(unknown))}; its shape has {', '.join(_DEFAULT)}")
        choices: ClusterShape = {**_DEFAULT, **shape}
        port, router_port, admin_port = choices["port"], choices["router_port"], choices["admin_port"]
        mount_router, switch_roles = choices["mount_router"], choices["switch_roles"]
        switchable = switch_roles or choices["switchable"]
        sizes = placed_kinds(choices["roles"])
        refuse_impossible(
            models, dict.fromkeys(kind.role for kind in sizes), mount_router=mount_router, switch_roles=switch_roles
        )
        tiers = {kind: tiers.get(kind) or TierPlan(Tier(kind.tier)) for kind in sizes if kind.tier}
        kinds = [kind for kind, size in sizes.items() for _ in range(size)]
        processes = len(models) * (len(kinds) + 1) + 2
        asked_for = {port, router_port, *range(admin_port, admin_port + processes)}
        chosen = ports.free(processes + 1, asked_for)
        taking = iter(chosen)
        manager_port, scaler_port = next(taking), next(taking)
        at = ports.address(manager_port)
        acting = ("--autoscale",) if autoscale else ()
        own_flags = ("--scaler", ports.address(scaler_port), *acting) if scaled else ()
        own_flags += ("--switch-roles",) if switch_roles else ()
        manager = ProcessPlan(MANAGER, "pool_manager", manager_port, own_flags, tuple(options.get("pool_manager", ())))
        engines = [
            engine(
                model,
                kind,
                _name(model, kind, number),
                next(taking),
                manager=at,
                threads=threads,
                options=options,
                switches=switchable,
                tier=tiers.get(kind),
            )
            for model in models
            for kind, number in _numbered(kinds)
        ]
        engines = with_gpus(engines, tiers)
        router_ports = [router_port or next(taking), *(next(taking) for _ in models[1:])]
        routers = [
            _router(model, at, router_port, options) for model, router_port in zip(models, router_ports, strict=True)
        ]
        gateway = _gateway(routers, port or next(taking), options, mount_router=mount_router)
        front = (gateway,) if mount_router else (*routers, gateway)
        plans = _with_admin_ports((manager, *engines, *front), admin_port, {*chosen, *asked_for})
        by_model = {model.model_id: port for model, port in zip(models, router_ports, strict=True)}
        return cls(plans, by_model, mount_router, switchable, scaler_port if scaled else None, tiers)

    def overridden_variables(self, drain_s: float) -> tuple[str, ...]:
        """A line for each setting in the environment that has no effect, as the processes get another value in a flag."""
        flags: dict[str, set[str]] = {}
        for plan in self.processes:
            for name, value in _flags(plan.service, plan.command(drain_s)[1:]):
                flags.setdefault(name, set()).add(value)
        lines = []
        for name, value in sorted(os.environ.items()):  # noqa: TID251 - children get it
            given = flags.get(name.upper(), {value})
            if {flag.lower() for flag in given} == {value.lower()}:
                continue
            instead = next(iter(given)) if len(given) == 1 else f"{len(given)} values, one for each process"
            lines.append(f"{name} has no effect on a local cluster, which sets {instead}")
        return tuple(lines)

    def wanted_ports(self) -> Iterator[ports.Wanted]:
        """Ports to listen on; those chosen by flags first."""
        flags = {"gateway": "--port", "router": "--router-port"}
        for plan in front_first(self.processes):
            yield ports.Wanted(plan.port, _the(plan), flags.get(plan.service, ""))
        if self.mounts_router:
            for port in self.router_ports.values():
                yield ports.Wanted(port, "the router", flags["router"])
        for plan in front_first(self.processes):
            yield ports.Wanted(plan.admin_port, f"the admin port of {_the(plan)}", "--admin-port")
        if self.scaler_port is not None:
            yield ports.Wanted(self.scaler_port, "the scaler")


def _flags(service: str, line: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flags of a command line with their values, under the names of their environment variables. Those of a service
    that runs in the process are among them.
    """
    for at, flag in enumerate(line):
        if not flag.startswith("--"):
            continue
        name, equals, value = flag.removeprefix("--").partition("=")
        following = line[at + 1 : at + 2]
        if not equals:
            value = following[0] if following and not following[0].startswith("--") else str(not name.startswith("no-"))
        yield f"TRIPTYCH_{service}_{name.removeprefix('no-')}".replace("-", "_").upper(), value
        if name.startswith("mount-"):
            yield from _flags(name.removeprefix("mount-"), shlex.split(value))


def refuse_tls() -> None:
    """Raises ClusterError if the environment gives TLS to services: ``triptych up`` asks all of them, and serves its scaler,
    without it.
    """
    named = sorted(name for name in os.environ if _TLS.fullmatch(name.upper()))  # noqa: TID251 - children get it
    if named:
        text = f"a local cluster runs without TLS, on the loopback address: unset {', '.join(named)}"
        raise ClusterError(text, caller=True)


def refuse_impossible(
    models: Sequence[Model], roles: Collection[Role], *, mount_router: bool, switch_roles: bool
) -> None:
    """Raises ClusterError if the router cannot be mounted, or the pool manager could switch no instance: it moves those that serve one
    stage, between such stages.
    """
    if mount_router and len(models) > 1:
        text = "--mount-router serves one model: a router of its own serves each of several"
        raise ClusterError(text, caller=True)
    if switch_roles and sum(len(role.stages) == 1 for role in roles) < 2:
        text = "--switch-roles moves instances between roles E, P and D, of which it needs two: such as --roles E:2,P:1,D:1"
        raise ClusterError(f"{text}; there will be {', '.join(role.value for role in roles)}", caller=True)


def service_of(role: Role, *, switches: bool) -> str:
    """The service that an instance of this role is a process of. One that ``switches`` roles can serve every stage."""
    return "encoder" if role is Role.E and not switches else "text"


def engine(
    model: Model,
    kind: Kind,
    name: str,
    port: int,
    *,
    manager: str,
    threads: int,
    options: Mapping[str, Sequence[str]],
    switches: bool,
    admin_port: int = 0,
    tier: TierPlan | None = None,
    degree: int | None = None,
) -> ProcessPlan:
    """An instance, which registers with the pool manager at the address ``manager``. If it ``switches``, it can serve every stage.
    ``degree`` is its tensor-parallel one, None for that of its settings.
    """
    role = kind.role
    widest, service = Role.EPD if switches else role, service_of(role, switches=switches)
    role_flags: tuple[str, ...] = () if service == "encoder" else ("--role", role.value)
    if switches:
        role_flags += ("--switchable", widest.value)
    if service == "text" and widest.serves(Stage.ENCODE):
        role_flags += _mounted((*options.get("mounted_encoder", ()), *(() if tier is None else tier.mounted)))
    shared = ("--model", str(model.path), "--model-id", model.model_id, "--torch-threads", str(threads))
    own_flags = ("--instance-id", name, "--pool-manager", manager, *shared, *role_flags)
    given = (*options.get(service, ()), *(() if tier is None else tier.of(service)))
    given += () if degree is None else (f"--tensor-parallel={degree}",)
    return ProcessPlan(name, service, port, own_flags, given, admin_port, role, model, kind.tier)


def with_gpus(plans: Sequence[ProcessPlan], tiers: Tiers, others: Iterable[ProcessPlan] = ()) -> list[ProcessPlan]:
    """Instances with GPUs of their own, where their tier has some. ``others`` keep those that they have. Raises ClusterError if there are
    not enough.
    """
    taken = {device for plan in others for device in plan.gpus.split(",") if device}
    given = []
    for plan in plans:
        tier = None if plan.role is None else tiers.get(Kind(plan.role, plan.tier))
        if tier is None or not tier.gpus:
            given.append(plan)
            continue
        free = next((gpus for gpus in tier.gpus if taken.isdisjoint(gpus.split(","))), None)
        if free is None:
            raise ClusterError(f"all GPUs of tier {plan.tier} are in use: {', '.join(tier.gpus)}", caller=True)
        taken.update(free.split(","))
        given.append(replace(plan, gpus=free))
    return given


def _mounted(encoder_flags: Sequence[str]) -> tuple[str, ...]:
    """The flag with those of the encoder that a text process has in it."""
    return (f"--mount-encoder={shlex.join(encoder_flags)}",) if encoder_flags else ()


def name_pattern(model: Model, kind: Kind) -> str:
    """The names of instances of a model and kind, with ``{}`` for their number."""
    return f"{model.prefix}{kind.name}-{{}}"


def _name(model: Model, kind: Kind, number: int) -> str:
    return name_pattern(model, kind).format(number)


def _numbered(kinds: Sequence[Kind]) -> Iterator[tuple[Kind, int]]:
    """Kinds, each with its number among equal ones."""
    numbers: Counter[Kind] = Counter()
    for kind in kinds:
        numbers[kind] += 1
        yield kind, numbers[kind]


def _router(model: Model, manager: str, port: int, options: Mapping[str, Sequence[str]]) -> ProcessPlan:
    name = f"{model.prefix}router"
    own_flags = (
        "--instance-id",
        name,
        "--model",
        str(model.path),
        "--model-id",
        model.model_id,
        "--pool-manager",
        manager,
    )
    return ProcessPlan(name, "router", port, own_flags, tuple(options.get("router", ())), model=model)


def _gateway(
    routers: Sequence[ProcessPlan], port: int, options: Mapping[str, Sequence[str]], *, mount_router: bool
) -> ProcessPlan:
    """A gateway of these routers, or with the first of them in it."""
    if mount_router:
        router = routers[0]
        line = (*router.arguments, "--host", ports.HOST, "--port", str(router.port), *router.options)
        router_flags: tuple[str, ...] = (f"--mount-router={shlex.join(line)}",)
    else:
        router_flags = ("--router", ",".join(ports.address(router.port) for router in routers))
    return ProcessPlan("gateway", "gateway", port, router_flags, tuple(options.get("gateway", ())))


def front_first(plans: Iterable[ProcessPlan]) -> list[ProcessPlan]:
    """Plans in display order: gateway, routers, pool manager, instances."""
    plans = list(plans)
    engines = [plan for plan in plans if plan.service in ENGINES]
    return [*(plan for plan in reversed(plans) if plan.service not in ENGINES), *engines]


def _with_admin_ports(plans: Sequence[ProcessPlan], first: int, others: Collection[int]) -> tuple[ProcessPlan, ...]:
    """Assign consecutive admin ports from ``first``, or free ones not in ``others`` when it is 0. Raises ClusterError."""
    if first + len(plans) - 1 > ports.MAX_PORT:
        text = f"--admin-port {first}: {len(plans)} processes need as many consecutive ports"
        raise ClusterError(text, caller=True)
    chosen = range(first, first + len(plans)) if first else ports.free(len(plans), others)
    admin_ports = {plan.name: port for plan, port in zip(front_first(plans), chosen, strict=True)}
    return tuple(replace(plan, admin_port=admin_ports[plan.name]) for plan in plans)


def _the(plan: ProcessPlan) -> str:
    return f"the {plan.name}" if plan.name == plan.service else plan.name


def package_of(service: str) -> str:
    """The package that ``python -m`` runs as a service."""
    return f"triptych.services.{service}"
