"""Makes what the planner judges and simulates, from the options of a command line: instances on devices, and deployments."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from triptych.cli.outcome import CliError
from triptych.cli.profile.command import PartEngine
from triptych.cli.service_options import Flags, loaded, parse
from triptych.cli.simulate.deployment import UNUSABLE, CostedModel, Hardware
from triptych.domain.device import BadCatalogue
from triptych.domain.instance import ModelInfo
from triptych.domain.profile import Origin, Profile
from triptych.domain.stage import ModelPart, Role
from triptych.families.base import Family
from triptych.planning.pools import Limits, Offer
from triptych.policy.roofline import DoesNotFit, Target
from triptych.runtime.plans import Options, Placement, words
from triptych.runtime.process import CannotStart
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.text.settings import TextSettings
from triptych.sim.scenario import BYTES_PER_PIXEL, Deployment, InstanceKind

_BATCHES = {"max-batch-items", "max-sequences", "token-budget"}
"""Options by which batch limits are set, so that the planner does not choose them."""
_MEASURED_ERROR = 0.21
"""What docs/fidelity.md says of three in four P50 with measured profiles, up to 60 % of the capacity."""
_COMPUTED_ERROR = 0.16
"""The larger of the errors of computed costs on an H200."""


class ModelFactory:
    """``planning.planner.Factory`` of one model."""

    def __init__(self, model: str, hardware: Hardware, settings: Options) -> None:
        """``settings``: options of services that all placements share. Raises CliError."""
        self._hardware = hardware
        self._settings = settings
        self._given: Flags = parse(words(settings))
        try:
            self._costed = CostedModel(model, hardware)
        except UNUSABLE as error:
            raise CliError(str(error), caller=True) from None
        encoder: EncoderSettings = loaded("encoder", (f"--model={model}", *self._given["encoder"]))
        text: TextSettings = loaded("text", (f"--model={model}", *self._given["text"]))
        self._engines = {
            part: PartEngine(settings.engine, settings.vllm_args)
            for part, settings in ((ModelPart.ENCODER, encoder.engine), (ModelPart.DECODER, text.engine))
        }
        self._set_limits = Limits(
            encoder.batches.max_batch_items, text.engine.max_sequences, text.engine.most_step_tokens
        )
        self.notes: dict[str, None] = {}
        """Where costs come from, as deployments that were made say."""
        self._profiles: dict[str, Profile] = {}

    @property
    def model_id(self) -> str:
        return self._costed.model_id

    @property
    def family(self) -> Family:
        return self._costed.family

    @property
    def info(self) -> ModelInfo:
        return self._costed.info

    @property
    def priced(self) -> Sequence[str]:
        """GPUs of the catalogue that have a price."""
        devices = self._costed.catalogue.devices.values()
        return [device.name for device in devices if device.kind == "gpu" and device.price is not None]

    @property
    def bytes_per_pixel(self) -> float:
        return BYTES_PER_PIXEL

    @property
    def prepare_cores(self) -> int:
        return self._hardware.prepare_cores

    @property
    def roles(self) -> Sequence[Role]:
        """With vLLM two: it does not encode in its steps, and hands answers over on CPUs only."""
        return (Role.E, Role.PD) if self._engines[ModelPart.DECODER].by_vllm else tuple(Role)

    @property
    def given(self) -> Collection[str]:
        return self._settings.keys()

    def check_devices(self, names: Sequence[str]) -> None:
        """Raises CliError for a device that is not in the catalogue."""
        for name in names:
            try:
                self._costed.catalogue.device(name)
            except BadCatalogue as error:
                raise CliError(f"--devices {name}: {error}", caller=True) from None

    def offer(self, role: Role, device: str, degree: int) -> Offer:
        """Raises DoesNotFit."""
        most = self._hardware.devices_per_host
        if most is not None and degree > most:
            raise DoesNotFit(f"{role.value} has {degree} devices, a host has {most} (--devices-per-host)")
        target = self._costed.target(device, degree)
        try:
            kind = self._costed.kind(role, target, self._engines)
        except CliError as error:  # without a profile of this degree
            raise DoesNotFit(str(error)) from None
        self._profiles |= {profile.file_name: profile for profile in kind.profiles.values()}
        limits = self._set_limits if _BATCHES & self._settings.keys() else None
        kv_tokens = None
        if ModelPart.DECODER in kind.profiles:
            kv_nbytes, limits = self._text(role, target, kind, limits)
            token_nbytes = kind.profiles[ModelPart.DECODER].measured.kv_token_nbytes
            kv_tokens = kv_nbytes // token_nbytes if token_nbytes else None
        price = target.device.price
        return Offer(role, kind, kv_tokens, None if price is None else degree * price.usd_per_hour, limits)

    def _text(self, role: Role, target: Target, kind: InstanceKind, limits: Limits | None) -> tuple[int, Limits | None]:
        """KV memory of an instance, and its batch limits: those of vLLM are its own. Raises DoesNotFit."""
        engine = self._engines[ModelPart.DECODER]
        if not engine.by_vllm:
            return self._costed.kv_nbytes(role, target, kind), limits
        try:
            own = self._costed.vllm_limits(engine, target)
        except CannotStart as error:
            raise DoesNotFit(str(error)) from None
        kv_nbytes = self._costed.vllm_kv_nbytes(own, role, target, kind)
        return kv_nbytes, Limits(self._set_limits.max_batch_items, own.max_sequences, own.token_budget)

    def deployment(self, placement: Placement) -> Deployment:
        """Raises ValueError."""
        hardware = replace(
            self._hardware,
            device=placement.devices_text,
            degree=placement.degrees_text,
            prepare_cores=placement.prepare_cores,
        )
        try:
            made = self._costed.deployment(
                hardware,
                placement.roles_text,
                None,
                autoscale=placement.autoscale,
                switch_roles=placement.switch_roles,
                given=parse(words({**self._settings, **placement.settings})),
                faults=(),
            )
        except CliError as error:
            raise ValueError(str(error)) from None
        self.notes |= dict.fromkeys(made.notes)
        return made.deployment

    def expected_error(self) -> tuple[float | None, str]:
        """The relative error to be expected of predicted times, and where that figure comes from."""
        profiles = list(self._profiles.values())
        if all(profile.measured.origin is Origin.MEASURED for profile in profiles):
            own = max((row.median for profile in profiles for row in profile.errors), default=0.0)
            return max(own, _MEASURED_ERROR), "measured profiles: P50 up to 60 % of the capacity (docs/fidelity.md)"
        devices = {profile.identity.hardware for profile in profiles}
        if devices == {"NVIDIA H200"}:
            return _COMPUTED_ERROR, "computed costs: passes of an H200; services were not compared on GPUs"
        return None, "computed costs: efficiencies are those of an H200, and these devices were not measured"
