"""A deployment to simulate, from the options that ``triptych up`` has, and the devices that it does not need."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

from triptych.cli.cluster_settings import ClusterSettings
from triptych.cli.model import Model
from triptych.cli.outcome import CliError
from triptych.cli.placement import DEFAULT_ROLES, placed_kinds
from triptych.cli.presets import PRESETS, Preset, PresetName
from triptych.cli.profile.analytic import AnalyticModel
from triptych.cli.profile.command import PartEngine
from triptych.cli.service_options import Flags, loaded
from triptych.domain.device import BadCatalogue, Catalogue, Device
from triptych.domain.device import Host as DeviceHost
from triptych.domain.embedding import DType
from triptych.domain.instance import ModelInfo
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.profile import BadProfile, Origin, Profile, ProfileIdentity
from triptych.domain.scaling import Kind, parse_kind
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.engine.checkpoint import DTYPES
from triptych.families.base import Family, count_tokens
from triptych.families.model_files import BadModel
from triptych.files import BadFile, read_toml
from triptych.integrations.vllm.limits import EngineLimits, engine_limits
from triptych.policy.batching import MEASURED_SHARE, largest_within
from triptych.policy.costs import Costs, CostWarning
from triptych.policy.iteration import ImageBudget
from triptych.policy.roofline import (
    DoesNotFit,
    Origins,
    Target,
    decoder_memory,
    decoder_profile,
    encoder_memory,
    encoder_profile,
)
from triptych.runtime.catalogue import at_hand, load_catalogue
from triptych.runtime.process import CannotStart
from triptych.runtime.profiles import read_profiles, write_profile
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.services.router.settings import RouterSettings
from triptych.services.text.settings import TextSettings
from triptych.sim.host import BadHost, Host
from triptych.sim.network import Hosts, LinkSpeed
from triptych.sim.scenario import Deployment, Fault, InstanceKind
from triptych.sim.shared_device import Sharing

_GIB = 1 << 30
_ARENA_BYTES = 4 * _GIB
"""Of each arena, unless it is set: the defaults of services are for small machines."""
_ARENAS = {"kv_arena_bytes": _ARENA_BYTES, "image_cache_bytes": _ARENA_BYTES}
_IMAGE_PX = 448
_CONTEXT = 512
"""Tokens of each answer beside which a budget is computed."""
_LINK_S = 0.0003
_IN_TURNS = 0.5
"""The speed of each of two engines that take turns."""
_MAX_HOST_NBYTES = 1 << 16
_NOT_SIMULATED = (
    "--embedding-files",
    "--delay-profile",
    "--resident=role",
    "--tls",
    "--redis",
    "--plan",
    "--replan",
)
"""Options of services that would be without effect."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Devices, as the options say. ``device`` and ``degree`` are of all roles, or ``ROLE[@TIER]=VALUE,...``."""

    device: str
    degree: str
    dtype: str | None
    catalogue: Path | None
    profiles: Path | None
    prepare_cores: int
    control_s: float
    host: Path | None = None
    """A description of the host that all processes share."""
    devices_per_host: int | None = None
    host_network_nbytes_per_s: float | None = None
    """What the instances of one of these hosts share, in each direction."""
    encoders_on: str | None = None
    """The role on whose devices encoders compute."""
    shared_speed: float | None = None
    """Of each of two engines that compute at once on one device, over what it has alone. None: they take turns."""

    def hosts(self, degrees: Mapping[Kind, int]) -> Hosts | None:
        """The hosts on which instances of these tensor-parallel degrees are placed. Raises CliError."""
        if self.devices_per_host is None:
            if self.host_network_nbytes_per_s is not None:
                raise CliError("--host-network needs --devices-per-host", caller=True)
            return None
        if self.host is not None:
            raise CliError("--host is one host for all: leave out --devices-per-host", caller=True)
        for pool, degree in degrees.items():
            if degree > self.devices_per_host:
                raise CliError(
                    f"--tensor-parallel: {pool} has {degree} devices, a host has {self.devices_per_host} (--devices-per-host)",
                    caller=True,
                )
        rate = self.host_network_nbytes_per_s
        return Hosts(self.devices_per_host, None if rate is None else LinkSpeed(rate))

    def sharing(self, targets: Mapping[Kind, Target], *, fixed: bool) -> Sharing | None:
        """Whose devices encoders compute on. ``fixed``: instances keep their number and roles. Raises CliError."""
        if self.encoders_on is None:
            if self.shared_speed is not None:
                raise CliError("--shared-speed needs --encoders-on", caller=True)
            return None
        encoders = Kind(Role.E)
        pool = next((pool for pool in targets if str(pool) == self.encoders_on and pool != encoders), None)
        if pool is None or pool.tier or encoders not in targets:
            raise CliError(
                f"--encoders-on {self.encoders_on}: there are no encoders (role E) and instances of that role",
                caller=True,
            )
        if targets[pool] != targets[encoders]:
            raise CliError(f"--encoders-on {self.encoders_on}: E and {pool} have different devices", caller=True)
        if not fixed or self.host is not None:
            raise CliError("--encoders-on goes without --autoscale, --switch-roles and --host", caller=True)
        return Sharing(pool.role, _IN_TURNS if self.shared_speed is None else self.shared_speed)


@dataclass(frozen=True, slots=True)
class Simulated:
    """A deployment, and what is to be said of it."""

    deployment: Deployment
    prices: Mapping[str, float]
    """Per hour of a device, in dollars."""
    notes: Sequence[str]


def deployment_of(
    *,
    model: str,
    roles: str | None,
    preset: PresetName | None,
    autoscale: bool,
    switch_roles: bool | None,
    hardware: Hardware,
    given: Flags,
    faults: Sequence[str],
) -> Simulated:
    """Raises CliError, before anything runs."""
    try:
        return CostedModel(model, hardware).deployment(
            hardware, roles, preset, autoscale=autoscale, switch_roles=switch_roles, given=given, faults=faults
        )
    except UNUSABLE as error:
        raise CliError(str(error), caller=True) from None


UNUSABLE = (BadCatalogue, BadModel, BadProfile, CannotStart, DoesNotFit)
"""Errors of a model, a device or profiles that do not fit each other. Their messages are for the user."""


class CostedModel:
    """A model, and what its parts cost on the devices of a catalogue: by measured profiles if there are some, else computed."""

    def __init__(self, model: str, hardware: Hardware) -> None:
        """``hardware``: its catalogue, profiles and dtype are used, and its first device where no dtype is given. Raises one of ``UNUSABLE``."""
        self._hardware = hardware
        self._catalogue: Catalogue = load_catalogue(hardware.catalogue)
        named = Model.named(model) if model == "demo" else None
        self._path = Path(model) if named is None else named.path
        self._model = AnalyticModel.named(str(self._path))
        self.model_id = self._path.resolve().parent.name if self._path.is_file() else self._path.name
        self._measured = () if hardware.profiles is None else _read(hardware.profiles)
        self._dtype = self._usual_dtype() if hardware.dtype is None else DTYPES[hardware.dtype]
        self._profiles: dict[tuple[ModelPart, str, int, PartEngine], Profile] = {}
        """By part, device, degree and engine."""

    @property
    def catalogue(self) -> Catalogue:
        return self._catalogue

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            self.model_id,
            self._model.digest(ModelPart.DECODER),
            self._dtype,
            self.family.hidden_size,
            self.family.context_length,
        )

    @property
    def family(self) -> Family:
        return self._model.architecture.family

    def _usual_dtype(self) -> DType:
        """The dtype of measured profiles, else the model's on GPUs."""
        if self._measured:
            return self._measured[0].identity.dtype
        first = self._device(next(iter(by_pool(self._hardware.device, "--device").values())))
        return DTYPES["float32" if first.kind == "cpu" else self._model.dtype_name]

    def target(self, device: str, degree: int) -> Target:
        """Raises BadCatalogue."""
        return Target(self._device(device), self._dtype, degree)

    def deployment(
        self,
        hardware: Hardware,
        roles: str | None,
        preset_name: PresetName | None,
        *,
        autoscale: bool,
        switch_roles: bool | None,
        given: Flags,
        faults: Sequence[str],
    ) -> Simulated:
        """A cluster of the model, on hardware of the same catalogue, profiles and dtype. Raises CliError, or one of ``UNUSABLE``."""
        for flag in dict.fromkeys(flag for flags in given.values() for flag in flags):
            if flag.startswith(_NOT_SIMULATED):
                raise CliError(f"simulate does not have {flag.partition('=')[0]}", caller=True)
        preset: Preset | None = None if preset_name is None else PRESETS[preset_name]
        sizes = placed_kinds(roles or (DEFAULT_ROLES if preset is None else preset.roles))
        if preset is not None and preset_name is not None and roles is not None:
            preset.placed_as(roles, preset_name)
        switches = (preset is not None and preset.switching) if switch_roles is None else switch_roles
        tiers = {pool: size for pool, size in sizes.items() if pool.tier}
        if tiers and (autoscale or switches):
            raise CliError(f"--roles {roles}: tiers are simulated without --autoscale and --switch-roles", caller=True)
        devices = {pool: self._device(name) for pool, name in _of_pools(hardware.device, sizes, "--device").items()}
        degrees = {
            pool: degree_of(text) for pool, text in _of_pools(hardware.degree, sizes, "--tensor-parallel").items()
        }
        targets = {pool: self.target(devices[pool].name, degrees[pool]) for pool in sizes}
        engines = {
            ModelPart.ENCODER: PartEngine.of_flags(given.get("encoder", ())),
            ModelPart.DECODER: PartEngine.of_flags(given.get("text", ())),
        }
        kinds = {
            pool: replace(
                self.kind(pool.role, targets[pool], engines, switches=switches), prepare_cores=hardware.prepare_cores
            )
            for pool in sizes
        }
        sharing = hardware.sharing(targets, fixed=not autoscale and not switches)
        if sharing is not None:
            kinds[Kind(Role.E)] = replace(kinds[Kind(Role.E)], devices=0)
        cluster = ClusterSettings(
            (Model(self._path, self.model_id),),
            by_role(sizes),
            given,
            preset,
            autoscale=autoscale,
            switch_roles=switches,
            tiers=tiers,
        )
        with TemporaryDirectory() as directory:
            profiles = Path(directory)
            for profile in (profile for kind in kinds.values() for profile in kind.profiles.values()):
                write_profile(profiles / profile.file_name, profile)
            flags = cluster.flags(lambda: profiles)
        flags = {service: _without_profiles(flags[service]) for service in flags}
        texts: dict[Kind, TextSettings] = {}
        budgets: dict[Kind, ImageBudget] = {}
        context_tokens = self.family.context_length
        decoding = engines[ModelPart.DECODER]
        for pool in sizes:
            role = pool.role
            if role is Role.E and not switches:
                continue
            beside = ceil(sizes[Kind(Role.E)] / sizes[pool]) if sharing is not None and sharing.role is role else 0
            text = self._text(
                role, targets[pool], kinds[pool], flags["text"], beside, switches=switches, engine=decoding
            )
            if decoding.by_vllm:
                limits = self.vllm_limits(decoding, targets[pool])
                text = self._within_limits(text, limits, role, targets[pool], kinds[pool], beside)
                context_tokens = min(context_tokens, limits.context_tokens)
            texts[pool], budget = self._within_objective(text, kinds[pool])
            if budget is not None:
                budgets[pool] = budget
        encoder: EncoderSettings = loaded(
            "encoder", (f"--model={self._path}", *flags["encoder"]), {"arena_bytes": _ARENA_BYTES}
        )
        if PartEngine(encoder.engine.engine, encoder.engine.vllm_args) != engines[ModelPart.ENCODER]:
            raise CliError(
                "the engine of encoders is set in the environment: use --encoder-engine and --encoder-vllm-args",
                caller=True,
            )
        router: RouterSettings = loaded("router", flags["router"])
        acting: tuple[str, ...] = (
            ("--autoscale", "--scaler=127.0.0.1:1") if autoscale else ()
        )  # the cluster has a scaler of its own
        acting += ("--switch-roles",) if switches else ()
        manager: PoolManagerSettings = loaded("pool_manager", ("--allow-network", *acting, *flags["pool_manager"]))
        deployment = Deployment(
            model=replace(self.info, context_length=context_tokens),
            family=self.family,
            sizes=sizes,
            kinds=kinds,
            router=router,
            encoder=encoder,
            texts=texts,
            manager=manager,
            image_budgets=budgets,
            scales=autoscale,
            control_s=hardware.control_s,
            host=None if hardware.host is None else _host(hardware.host),
            hosts=hardware.hosts(degrees),
            encoders_share=sharing,
            faults=[_fault(text, sizes) for text in faults],
        )
        prices = {device.name: device.price.usd_per_hour for device in devices.values() if device.price is not None}
        return Simulated(deployment, prices, tuple(self._notes(kinds, devices, engines)))

    def _text(
        self,
        role: Role,
        target: Target,
        kind: InstanceKind,
        flags: Sequence[str],
        beside: int,
        *,
        switches: bool,
        engine: PartEngine,
    ) -> TextSettings:
        """The settings of a role's instances. ``beside``: encoders of other instances on their devices. Raises CliError and DoesNotFit."""
        below = dict(_ARENAS)
        if not engine.by_vllm:
            below["kv_cache_bytes"] = self.kv_nbytes(role, target, kind, beside)
        switchable = (f"--switchable={Role.EPD.value}",) if switches else ()
        given = (f"--model={self._path}", f"--role={role.value}", *switchable, *flags)
        text: TextSettings = loaded("text", given, below)
        if text.switchable is not None and not switches:
            raise CliError("--switchable is set in the environment: use --switch-roles", caller=True)
        if PartEngine(text.engine.engine, text.engine.vllm_args) != engine:
            raise CliError("the engine is set in the environment: use --engine and --vllm-args", caller=True)
        return text

    def _device(self, name: str) -> Device:
        return at_hand(self._catalogue.device(name), self._hardware.prepare_cores)

    def kind(
        self, role: Role, target: Target, engines: Mapping[ModelPart, PartEngine], *, switches: bool = False
    ) -> InstanceKind:
        """Instances of a role, with an engine for each part. Raises CliError if no profile fits, and DoesNotFit."""
        stages = Role.EPD if switches else role
        parts = [ModelPart.ENCODER] * stages.serves(Stage.ENCODE)
        if stages.serves(Stage.PREFILL) or stages.serves(Stage.DECODE):
            parts.append(ModelPart.DECODER)
        return InstanceKind(
            device=target.device.name,
            devices=target.degree,
            profiles={part: self._profile(part, target, engines[part]) for part in parts},
            prepare_cores=self._hardware.prepare_cores,
            copied_bytes_per_s=target.degree * target.device.host_nbytes_per_s,
            link=LinkSpeed(target.degree * target.device.network_nbytes_per_s, _LINK_S),
            within_host=LinkSpeed(self._catalogue.host.shm_nbytes_per_s, self._catalogue.host.transfer_s / 2),
        )

    def _profile(self, part: ModelPart, target: Target, engine: PartEngine) -> Profile:
        """A measured one if there are some, else a computed one, which is kept. Raises CliError if none fits, and DoesNotFit."""
        key = part, target.device.name, target.degree, engine
        if (profile := self._profiles.get(key)) is None:
            profile = self._profiles[key] = self._new_profile(part, target, engine)
        return profile

    def _new_profile(self, part: ModelPart, target: Target, engine: PartEngine) -> Profile:
        """Of several measured ones the one of which the fewest arguments of vLLM change times, then the newest."""
        digest = self._model.digest(part)
        if self._measured:
            wanted = (part, digest, target.dtype, target.degree, engine.name)

            def fits(found: ProfileIdentity) -> bool:
                known = (found.part, found.digest, found.dtype, found.tensor_parallel, found.engine)
                return known == wanted and found.hardware in target.device.hardware

            fitting = [profile for profile in self._measured if fits(profile.identity)]
            if fitting:
                return max(fitting, key=lambda profile: (-len(engine.other_times(profile)), profile.measured.at))
            raise CliError(
                f"--profiles {self._hardware.profiles}: none is of this model's {part.value} in {target.dtype.value} with "
                f"engine {engine.name} on {target.degree} x {target.device.name} ({', '.join(target.device.hardware)})",
                caller=True,
            )
        self._model.memory(part, target)
        host: DeviceHost = self._catalogue.host
        origins = Origins(digest, "", f"triptych simulate --device {target.device.name}")
        if part is ModelPart.ENCODER:
            return encoder_profile(self._model.encoder(target.dtype), target, host, origins)
        return decoder_profile(self._model.architecture.decoder, target, host, origins)

    def kv_nbytes(
        self, role: Role, target: Target, kind: InstanceKind, beside: int = 0, usable: float | None = None
    ) -> int:
        """What the devices have left for keys and values. ``beside``: encoders of other instances on them. ``usable``: the share of their
        memory that engines use, if not the usual one. Raises DoesNotFit.
        """
        free = decoder_memory(self._model.architecture.decoder, target).free_nbytes * target.degree
        if usable is not None:
            free += (int(usable * target.device.memory_nbytes) - target.device.usable_nbytes) * target.degree
        if encoders := beside + (ModelPart.ENCODER in kind.profiles):
            encoder = self._model.encoder(target.dtype)
            encoder_memory(encoder, target)
            free -= encoders * encoder.parameters * target.dtype.itemsize
        if free <= 0:
            raise DoesNotFit(f"{role.value} on {target.device.name}: nothing is left for keys and values")
        return free

    def vllm_limits(self, engine: PartEngine, target: Target) -> EngineLimits:
        """Of a vLLM engine on a device. Raises CannotStart for arguments that are not simulated."""
        return engine_limits(
            engine.vllm_args,
            target.device,
            degree=target.degree,
            context_tokens=self.family.context_length,
            is_measured=bool(self._measured),
        )

    def vllm_kv_nbytes(
        self, limits: EngineLimits, role: Role, target: Target, kind: InstanceKind, beside: int = 0
    ) -> int:
        """KV memory of a vLLM engine on all its devices. ``beside``: encoders of other instances on them. Raises DoesNotFit."""
        given = (limits.kv_cache_bytes or 0) * target.degree
        return given or self.kv_nbytes(role, target, kind, beside, limits.memory_share)

    def _within_limits(
        self, settings: TextSettings, limits: EngineLimits, role: Role, target: Target, kind: InstanceKind, beside: int
    ) -> TextSettings:
        """The settings with the steps and memory that vLLM's arguments give its engine."""
        engine = replace(
            settings.engine,
            max_sequences=limits.max_sequences,
            token_budget=limits.token_budget,
            kv_cache_bytes=self.vllm_kv_nbytes(limits, role, target, kind, beside),
        )
        return settings.model_copy(update={"engine": engine})

    def _within_objective(self, settings: TextSettings, kind: InstanceKind) -> tuple[TextSettings, ImageBudget | None]:
        """The settings with the step budget that an engine would measure for ``tpot_slo_s``, and that of images beside decodes."""
        options = settings.engine_options
        if options.tpot_slo_s is None:
            return settings, None
        left_s, decoder = MEASURED_SHARE * options.tpot_slo_s, Costs(kind.profiles[ModelPart.DECODER])
        batch = options.max_sequences

        def step_s(tokens: int) -> float:
            return decoder.step_s(batch, _CONTEXT, [(tokens, 0)]).value

        budget = largest_within(left_s, options.most_step_tokens - batch, step_s) + batch
        engine = replace(settings.engine, token_budget=budget)
        budgeted = settings.model_copy(update={"engine": engine})
        if ModelPart.ENCODER not in kind.profiles:
            return budgeted, None
        encoder, decode_s = Costs(kind.profiles[ModelPart.ENCODER]), decoder.decode_s(batch, _CONTEXT).value
        tokens = self._image_tokens()
        items = largest_within(left_s, 32, lambda items: decode_s + encoder.encode_s(tokens, items).value)
        return budgeted, ImageBudget(items * tokens, _ARENA_BYTES)

    def _image_tokens(self) -> int:
        info = MediaInfo(Modality.IMAGE, "png", _IMAGE_PX, _IMAGE_PX, 0, bytes(32))
        return count_tokens(self.family, info)

    def _notes(
        self,
        kinds: Mapping[Kind, InstanceKind],
        devices: Mapping[Kind, Device],
        engines: Mapping[ModelPart, PartEngine],
    ) -> Sequence[str]:
        notes = []
        if self._model.is_config_alone:
            notes.append("there is only config.json: media are taken to be processed as the encoder needs it")
        for pool, kind in kinds.items():
            for part, profile in kind.profiles.items():
                source = "measured on" if profile.measured.origin is Origin.MEASURED else "computed for"
                arguments = profile.identity.options.get("vllm", "")
                told = f", vLLM with {arguments}" if arguments else ""
                if differing := engines[part].other_times(profile):
                    told += f"; {CostWarning.OTHER_OPTIONS.value}: {', '.join(differing)}"
                notes.append(f"costs of the {part.value} in {pool}: {source} {devices[pool].title}{told}")
        return list(dict.fromkeys(notes))


def _read(path: Path) -> tuple[Profile, ...]:
    """Raises BadProfile."""
    profiles, faults = read_profiles(path)
    if faults or not profiles:
        raise BadProfile(faults[0] if faults else f"{path}: there is no profile (*.json) in it")
    return tuple(profiles)


def _host(path: Path) -> Host:
    """Raises CliError."""
    try:
        return Host.parse(read_toml(path, _MAX_HOST_NBYTES))
    except (BadFile, BadHost) as error:
        raise CliError(f"--host {path}: {error}", caller=True) from None


def by_pool(text: str, option: str) -> Mapping[Kind, str]:
    """``VALUE`` for all roles, or ``ROLE[@TIER]=VALUE,...``. Raises CliError."""
    if "=" not in text:
        return dict.fromkeys(map(Kind, Role), text)
    values: dict[Kind, str] = {}
    for entry in text.split(","):
        letters, _, value = entry.strip().partition("=")
        try:
            pool = parse_kind(letters if value else "")
        except ValueError:
            raise CliError(f"{option} {text}: {entry.strip()!r} is not ROLE=VALUE", caller=True) from None
        if pool in values:
            raise CliError(f"{option} {text}: {letters} is there more than once", caller=True)
        values[pool] = value
    return values


def _of_pools(text: str, pools: Iterable[Kind], option: str) -> Mapping[Kind, str]:
    """The value of each of these pools: its own, or its role's. Raises CliError if one has none."""
    values = by_pool(text, option)
    found = {pool: values.get(pool, values.get(Kind(pool.role), "")) for pool in pools}
    if lacking := [str(pool) for pool, value in found.items() if not value]:
        raise CliError(f"{option} {text}: nothing is said of {' and '.join(lacking)}", caller=True)
    return found


def by_role(sizes: Mapping[Kind, int]) -> Mapping[Role, int]:
    """Instances of each role, of all its pools."""
    roles: Counter[Role] = Counter()
    for pool, size in sizes.items():
        roles[pool.role] += size
    return roles


def degree_of(text: str) -> int:
    """A tensor-parallel degree. Raises CliError."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 64):
        raise CliError(f"--tensor-parallel {text}: a degree is a number from 1 to 64", caller=True)
    return int(text)


def _fault(text: str, sizes: Mapping[Kind, int]) -> Fault:
    """``10:kill:encoder-1``. Raises CliError."""
    parts = text.split(":")
    names = [f"{pool.name}-{number}" for pool, count in sizes.items() for number in range(1, count + 1)]
    try:
        [seconds, what, instance] = parts
        at_s = float(seconds)
    except ValueError:
        raise CliError(
            f"--fault {text}: write SECONDS:WHAT:INSTANCE, for example 10:kill:{names[0]}", caller=True
        ) from None
    if not 0 <= at_s < float("inf"):
        raise CliError(f"--fault {text}: SECONDS is a number from 0 on", caller=True)
    if what not in ("kill", "start", "hang", "go-on"):
        raise CliError(f"--fault {text}: WHAT is kill, start, hang or go-on", caller=True)
    if instance not in names:
        raise CliError(f"--fault {text}: there will be no {instance}; there will be {', '.join(names)}", caller=True)
    return Fault(at_s, instance, what)  # type: ignore[arg-type]  # checked above


def _without_profiles(flags: Sequence[str]) -> tuple[str, ...]:
    """The simulated services are given their profiles."""
    return tuple(flag for flag in flags if not flag.startswith("--profiles="))
