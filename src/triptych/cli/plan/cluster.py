"""The cluster of a plan as its services are to run it: pools, settings of each service by name, and profiles.

The settings are checked as those of ``triptych up``. What a simulation takes for granted beside them becomes a setting: the
memory that a GPU has left, the data type, and the cores of an instance.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

from triptych import demo
from triptych.cli.cluster_settings import ClusterSettings
from triptych.cli.model import Model
from triptych.cli.outcome import CliError
from triptych.cli.plan.reading import service_words, simulation_of
from triptych.cli.process_plan import refuse_impossible, service_of
from triptych.cli.service_options import Flags, parse
from triptych.domain.device import BadCatalogue, Device
from triptych.domain.pool_sizes import planned_most
from triptych.domain.profile import Profile
from triptych.domain.scaling import Kind
from triptych.domain.stage import Role, Stage
from triptych.domain.tier import MAX_DEVICE, Tier, tier_name
from triptych.runtime.catalogue import load_catalogue
from triptych.runtime.hub import DEMO
from triptych.runtime.plans import Placement, PlanRecord
from triptych.runtime.profiles import write_profile
from triptych.sim.scenario import Deployment

Settings = Mapping[str, str]
"""Settings of a process by their own names."""
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_OF_MEMORY = ("kv_cache_bytes", "kv_arena_bytes", "image_cache_bytes")
"""Settings of text instances that a simulation takes from the device."""
_CUDA = "NVIDIA"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Sizes that a pool may have."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}-{self.most}"


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal instances of a role."""

    kind: Kind
    """Its role, and the tier where the plan has several pools of it."""
    count: int
    device: Device
    degree: int
    cores: int
    """Of each instance: on a CPU all that compute, else those that prepare."""
    service: str
    """The service that an instance is a process of."""
    settings: Settings
    mounted: Settings
    """Of the encoder in a text process; empty without one."""
    bounds: Bounds

    @property
    def role(self) -> Role:
        return self.kind.role

    @property
    def tier(self) -> Tier | None:
        """The kind of device of a pool on GPUs, or beside another one of its role."""
        if not self.on_gpu and not self.kind.tier:
            return None
        price = None if self.device.price is None else self.device.price.usd_per_hour * self.degree
        return Tier(
            self.kind.tier or tier_name(self.device.name), self.device.title.replace(",", " ")[:MAX_DEVICE], price
        )

    @property
    def on_gpu(self) -> bool:
        return self.device.kind == "gpu"

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of its processes."""
        line = shlex.join(_flag(name, value) for name, value in self.mounted.items())
        tier = {"tier": str(self.tier)} if self.kind.tier else {}
        return variables(self.service, {**self.settings, **tier, **({"mount_encoder": line} if line else {})})


@dataclass(frozen=True, slots=True)
class PlannedCluster:
    """What runs a placement. ``settings`` are those of router, pool manager and gateway."""

    model: str
    model_id: str
    placement: Placement
    pools: Sequence[Pool]
    settings: Mapping[str, Settings]
    own_options: Sequence[str]
    """Options of services as ``triptych up`` takes them: those of the plan and of the caller."""
    autoscale: bool
    profiles: Sequence[Profile]
    """Those that the plan was made with: pool managers and routers of a simulation know them too."""

    @property
    def pool_sizes(self) -> str:
        """As ``--pool-sizes`` has them."""
        return ",".join(f"{pool.kind}={pool.bounds}" for pool in self.pools)


def planned_cluster(
    plan: PlanRecord, placement: Placement, *, model: str | None, autoscale: bool, given: Sequence[str]
) -> PlannedCluster:
    """The cluster of a placement. ``model`` replaces the plan's, ``given`` are further options of services. Raises CliError."""
    autoscale = autoscale or placement.autoscale
    words = (*service_words(plan, placement), *_objectives(plan, placement), *given)
    devices = _devices(plan, placement)
    deployment = simulation_of(plan, placement).simulated.deployment
    profiles = _profiles(deployment)
    flags = _flags(plan, placement, words, profiles, autoscale=autoscale)
    bounds = _bounds(plan, placement, autoscale=autoscale)
    sizes = {kind: bounds[kind].least if autoscale else pool.count for kind, pool in placement.pools.items()}
    pools = [
        Pool(
            kind,
            pool.count,
            devices[kind],
            pool.degree,
            placement.prepare_cores,
            service_of(kind.role, switches=placement.switch_roles),
            *_instance(kind, placement, devices[kind], deployment, flags, sizes),
            bounds[kind],
        )
        for kind, pool in placement.pools.items()
    ]
    served = model or plan.model
    return PlannedCluster(
        served,
        demo.MODEL_ID if served == DEMO else plan.model_id,
        placement,
        pools,
        {service: _settings(flags[service]) for service in ("router", "pool_manager", "gateway")},
        words,
        autoscale,
        profiles,
    )


def _objectives(plan: PlanRecord, placement: Placement) -> Sequence[str]:
    """The router's objectives are the plan's, if no others were given."""
    if "slo" in plan.common or "slo" in placement.settings:
        return ()
    ttft_s, tpot_s = plan.objectives.ttft_s, plan.objectives.tpot_s
    parts = ["ttft=5x" if ttft_s is None else f"ttft={ttft_s:g}s", "tbt=5x" if tpot_s is None else f"tbt={tpot_s:g}s"]
    return (f"--slo={','.join(parts)}",) if plan.objectives.any else ()


def _devices(plan: PlanRecord, placement: Placement) -> Mapping[Kind, Device]:
    """Raises CliError for devices that have no image of Triptych, or degrees that its engine does not have."""
    given = plan.common.get("catalogue")
    try:
        catalogue = load_catalogue(None if given is None else Path(given))
        devices = {kind: catalogue.device(pool.device) for kind, pool in placement.pools.items()}
    except BadCatalogue as error:
        raise CliError(str(error), caller=True) from None
    for kind, device in devices.items():
        if device.kind == "gpu" and not device.hardware[0].startswith(_CUDA):
            raise CliError(f"{kind} on {device.name}: Triptych's engines run on CPUs and NVIDIA's GPUs", caller=True)
        degree = placement.pools[kind].degree
        if degree > 1 and (kind.role is Role.E or not _by_vllm(plan, placement)):
            raise CliError(
                f"{kind} has {degree} devices for each instance: only --engine vllm divides a language model",
                caller=True,
            )
    return devices


def _by_vllm(plan: PlanRecord, placement: Placement) -> bool:
    return {**plan.common, **placement.settings}.get("engine") == "vllm"


def _flags(
    plan: PlanRecord, placement: Placement, words: Sequence[str], profiles: Sequence[Profile], *, autoscale: bool
) -> Flags:
    """Flags of each service, checked as ``triptych up`` checks them, without profiles and the largest size. Raises CliError."""
    models = (Model(Path(plan.model), plan.model_id),)
    refuse_impossible(models, placement.roles.keys(), mount_router=False, switch_roles=placement.switch_roles)
    settings = ClusterSettings(
        models,
        placement.sizes,
        parse(words),
        autoscale=autoscale,
        switch_roles=placement.switch_roles,
        tiers={kind: pool.count for kind, pool in placement.pools.items() if kind.tier},
    )
    with TemporaryDirectory() as folder:
        write_profiles(profiles, Path(folder))
        flags = settings.flags(lambda: Path(folder))
    left_out = ("--profiles=", "--max-instances=")
    return {service: tuple(flag for flag in flags[service] if not flag.startswith(left_out)) for service in flags}


def _bounds(plan: PlanRecord, placement: Placement, *, autoscale: bool) -> Mapping[Kind, Bounds]:
    """Pools may have what the budget's devices allow beside the other pools as planned, or twice what is planned where the budget does not
    say. With autoscaling they may shrink to half of what is planned.
    """
    sizes = {kind: pool.count for kind, pool in placement.pools.items()}
    devices = {kind: pool.device for kind, pool in placement.pools.items()}
    degrees = {kind: pool.degree for kind, pool in placement.pools.items()}
    most = planned_most(sizes, devices, degrees, plan.budget.devices)
    return {kind: Bounds(ceil(count / 2) if autoscale else 1, most[kind]) for kind, count in sizes.items()}


def _instance(
    kind: Kind,
    placement: Placement,
    device: Device,
    deployment: Deployment,
    flags: Flags,
    sizes: Mapping[Kind, int],
) -> tuple[Settings, Settings]:
    """Settings of the instances of a pool, and of the encoders in them."""
    role = kind.role
    on_gpu, cores = device.kind == "gpu", placement.prepare_cores
    own = {"dtype": _DTYPES[deployment.model.dtype.value]}
    own |= {} if on_gpu else {"torch_threads": str(cores)}
    of_encoder = {"prepare_threads": str(cores)}
    if on_gpu:
        of_encoder["arena_bytes"] = str(deployment.encoder.arena_bytes)
    if service_of(role, switches=placement.switch_roles) == "encoder":
        own |= {"device": "cuda"} if on_gpu and deployment.encoder.engine.engine != "vllm" else {}
        return {**own, **of_encoder, **_settings(flags["encoder"])}, {}
    own["role"] = role.value
    if placement.switch_roles:
        own["switchable"] = Role.EPD.value
    text = deployment.texts[kind]
    if on_gpu and text.engine.engine != "vllm":  # which chooses device and memory itself
        simulated = text.flat(type(text))
        own |= {"device": "cuda", **{name: str(simulated[name]) for name in _OF_MEMORY}}
    if _hands_over(role, sizes):
        own["transfer_kv_on_drain"] = "true"
    encodes = placement.switch_roles or role.serves(Stage.ENCODE)
    return {**own, **_settings(flags["text"])}, {**of_encoder, **_settings(flags["mounted_encoder"])} if encodes else {}


def _hands_over(role: Role, sizes: Mapping[Kind, int]) -> bool:
    """Whether an answer can go on elsewhere when an instance of this role drains. ``sizes``: the least that pools have by themselves."""
    decoding = sum(size for other, size in sizes.items() if other.role.serves(Stage.DECODE))
    return role.serves(Stage.DECODE) and decoding > 1


def write_profiles(profiles: Sequence[Profile], directory: Path) -> Sequence[Path]:
    """The files that were written. Raises OSError."""
    paths = [directory / profile.file_name for profile in profiles]
    for path, profile in zip(paths, profiles, strict=True):
        write_profile(path, profile)
    return paths


def _profiles(deployment: Deployment) -> Sequence[Profile]:
    """Each once, whichever roles they are of."""
    found = {profile.file_name: profile for hosted in deployment.kinds.values() for profile in hosted.profiles.values()}
    return tuple(found.values())


def variables(service: str, settings: Settings) -> dict[str, str]:
    """Settings of a service as variables of its environment."""
    return {f"TRIPTYCH_{service}_{name}".upper(): value for name, value in settings.items()}


def _settings(flags: Sequence[str]) -> dict[str, str]:
    """Settings by their own names; the last of equal ones counts."""
    settings = {}
    for flag in flags:
        name, equals, value = flag.removeprefix("--").partition("=")
        is_off = not equals and name.startswith("no-")
        settings[name.removeprefix("no-" if is_off else "").replace("-", "_")] = (
            value if equals else str(not is_off).lower()
        )
    return settings


def _flag(name: str, value: str) -> str:
    dashed = name.replace("_", "-")
    return {"true": f"--{dashed}", "false": f"--no-{dashed}"}.get(value, f"--{dashed}={value}")
