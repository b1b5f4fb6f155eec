"""Profiles that are computed, not measured: from a model's configuration and the catalogue of devices."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from triptych.cli.outcome import CliError
from triptych.cli.profile.command import write
from triptych.domain.architecture import EncoderArchitecture
from triptych.domain.device import BadCatalogue, Device, Efficiency
from triptych.domain.embedding import DType
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.profile import BadProfile, ErrorRow, Profile
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import DTYPES, Checkpoint, stored_dtype
from triptych.errors import InvalidMedia
from triptych.families.architecture import Architecture
from triptych.families.model_files import BadModel, ModelFiles
from triptych.policy.calibration import Calibration, CannotCalibrate, calibrate, decoder_samples, encoder_samples
from triptych.policy.costs import Costs
from triptych.policy.roofline import (
    DoesNotFit,
    Memory,
    Origins,
    Target,
    decoder_memory,
    decoder_profile,
    encoder_memory,
    encoder_profile,
    least_degree,
)
from triptych.runtime.catalogue import at_hand, load_catalogue
from triptych.runtime.hub import model_directory
from triptych.runtime.process import CannotStart
from triptych.runtime.profiles import the_profile

_SIDES_PX = (112, 168, 224, 336, 448, 560, 672, 896, 1120, 1344, 1680, 2016, 2688, 4032)
"""Sides of images, with those that are measured."""
_SECONDS = (1, 5, 10, 30, 60, 120, 300)
_RATE_HZ = 16_000
_USUAL_DTYPE = "bfloat16"
_PROMPTS = (128, 1024, 4096)
_BATCHES = (1, 16, 64)
_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class AnalyticJob:
    """Options of ``triptych profile --analytic``."""

    model: str
    parts: tuple[ModelPart, ...]
    out: Path
    device: str
    degree: int
    dtype: str | None
    threads: int
    catalogue: Path | None
    calibrate: Path | None
    calibrate_model: str | None


def compute(job: AnalyticJob, console: Console) -> None:
    """Compute the profile of each part, show and write it. Raises CliError."""
    try:
        _compute(job, console)
    except (BadCatalogue, BadModel, BadProfile, CannotCalibrate, CannotStart, DoesNotFit) as error:
        raise CliError(str(error), caller=True) from None


def _compute(job: AnalyticJob, console: Console) -> None:
    catalogue = load_catalogue(job.catalogue)
    device = at_hand(catalogue.device(job.device), job.threads)
    model = AnalyticModel.named(job.model)
    dtype = DTYPES[job.dtype or ("float32" if device.kind == "cpu" else model.dtype_name)]
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if model.is_config_alone:
        console.print(
            "there is only config.json: media are taken to be processed as the encoder needs it", soft_wrap=True
        )
    for part in job.parts:
        calibrated = None if job.calibrate is None else _Calibrated.by(job, part, device, model)
        target = Target(device, dtype, job.degree)
        if calibrated is not None:
            target = target.reaching(calibrated.calibration.efficiency)
        source = target.device.efficiency.source
        origins = Origins(model.digest(part), at, f"triptych profile --analytic --device {device.name}")
        if calibrated is not None:
            origins = replace(origins, method=f"{origins.method}, {source}")
        memory = model.memory(part, target)
        if part is ModelPart.ENCODER:
            profile = encoder_profile(model.encoder(dtype), target, catalogue.host, origins)
        else:
            profile = decoder_profile(model.architecture.decoder, target, catalogue.host, origins)
        if calibrated is not None:
            profile = calibrated.taken_over(profile)
        path = job.out / profile.file_name
        write(path, profile)
        _show(profile, memory, target, console)
        console.print(
            f"source of costs: analytic. {device.title}: {device.source}. Efficiencies: {source}", soft_wrap=True
        )
        if calibrated is not None:
            calibrated.show(console)
        console.print(f"profile written to {path}\n", soft_wrap=True)


@dataclass(frozen=True, slots=True)
class AnalyticModel:
    """A model's files and the architecture that they describe, with or without weights."""

    files: ModelFiles
    architecture: Architecture
    is_config_alone: bool

    @classmethod
    def named(cls, model: str) -> "AnalyticModel":
        """A ``config.json``, a directory with or without weights, or a repository. Raises BadModel, CannotStart."""
        path = Path(model)
        if path.is_file():
            files, alone = ModelFiles.of_config(path), True
        else:
            files = ModelFiles.load(model_directory(path, weights=False))
            alone = not (files.image_processor or files.processor or files.tokenizer_config)
        return cls(files, Architecture.load(files), alone)

    @property
    def dtype_name(self) -> str:
        """Data type of the weights, by the configuration."""
        return stored_dtype(self.files) or _USUAL_DTYPE

    def digest(self, part: ModelPart) -> str:
        return Checkpoint(self.files, self.architecture.family, ()).part_digest(part)

    def memory(self, part: ModelPart, target: Target) -> Memory:
        """Raises DoesNotFit, with the least degree that would fit."""
        if part is ModelPart.ENCODER:
            return encoder_memory(self.encoder(target.dtype), target)
        decoder = self.architecture.decoder
        try:
            return decoder_memory(decoder, target)
        except DoesNotFit as error:
            degree = least_degree(decoder, target)
            hint = "" if degree is None else f"; --tensor-parallel {degree} would fit"
            raise DoesNotFit(f"the {part.value}: {error}{hint}") from None

    def encoder(self, dtype: DType) -> EncoderArchitecture:
        infos = []
        for info in _infos(self.architecture):
            try:
                self.architecture.family.outputs(info, dtype)
            except InvalidMedia:  # too long or too large for the model
                continue
            infos.append(info)
        return self.architecture.encoder(infos, dtype)


def _infos(architecture: Architecture) -> Iterator[MediaInfo]:
    """Images, or clips if the model takes no images."""
    if Modality.IMAGE in architecture.family.replacement_targets:
        for side_px in _SIDES_PX:
            yield MediaInfo(Modality.IMAGE, "png", side_px, side_px, 0, bytes(32))
        return
    for seconds in _SECONDS:
        samples = seconds * _RATE_HZ
        yield MediaInfo(
            Modality.AUDIO, "wav", 0, 0, 0, bytes(32), duration_s=seconds, samples=samples, sample_rate_hz=_RATE_HZ
        )


@dataclass(frozen=True, slots=True)
class _Calibrated:
    measured: Profile
    calibration: Calibration

    @classmethod
    def by(cls, job: AnalyticJob, part: ModelPart, device: Device, model: AnalyticModel) -> "_Calibrated":
        """Raises BadModel, BadProfile, CannotCalibrate, CannotStart."""
        assert job.calibrate is not None  # noqa: S101  # checked by the caller
        measured = the_profile(job.calibrate, part)
        of = model if job.calibrate_model is None else AnalyticModel.named(job.calibrate_model)
        identity = measured.identity
        if identity.digest != of.digest(part):
            raise CannotCalibrate(
                f"{job.calibrate.name} was measured with another {part.value} than that of "
                f"{job.calibrate_model or job.model}: name its model with --calibrate-model"
            )
        if identity.hardware not in device.hardware:
            raise CannotCalibrate(
                f"{job.calibrate.name} was measured on {identity.hardware!r}, {device.name} is {', '.join(device.hardware)}"
            )
        target = Target(device, identity.dtype, identity.tensor_parallel)
        if part is ModelPart.ENCODER:
            samples = encoder_samples(measured, of.encoder(identity.dtype), target)
        else:
            samples = decoder_samples(measured, of.architecture.decoder, target)
        day = measured.measured.at[:10]
        return cls(measured, calibrate(samples, target, f"calibrated with {job.calibrate.name} of {day}"))

    def taken_over(self, profile: Profile) -> Profile:
        """The profile with what was measured of the host, and the errors to be expected."""
        measured = self.measured
        return replace(
            profile,
            prepare=measured.prepare or profile.prepare,
            transfer=measured.transfer or profile.transfer,
            errors=self.calibration.held_out,
        )

    def show(self, console: Console) -> None:
        for name, rows in (("at these rows", self.calibration.fitted), ("at held-out rows", self.calibration.held_out)):
            console.print(f"error {name}: {'; '.join(map(_error, rows))}", soft_wrap=True)
        console.print(_reached(self.calibration.efficiency), soft_wrap=True)


def _error(row: ErrorRow) -> str:
    return f"{row.table} {row.median:.0%} (median of {row.points}), at most {row.worst:.0%}"


def _reached(reached: Efficiency) -> str:
    return (
        f"reached: {reached.compute:.0%} of the peak in products, {reached.attention:.0%} in attention, "
        f"{reached.bandwidth:.0%} of the memory's bandwidth; {1000 * reached.pass_s:.3g} ms for each pass and "
        f"{1000 * reached.sequence_s:.3g} ms for each sequence or item"
    )


def _show(profile: Profile, memory: Memory, target: Target, console: Console) -> None:
    identity, measured = profile.identity, profile.measured
    line = (
        f"{identity.part.value} {identity.digest[:12]} on {target.degree} x {target.device.name}, {identity.dtype.value}: "
        f"{measured.weights_nbytes / 1e9:.3g} GB of weights, starts in {measured.start_s:.0f} s; of each device's "
        f"{target.device.memory_nbytes / 1e9:.0f} GB {memory.weights_nbytes / 1e9:.3g} GB are weights and "
        f"{memory.free_nbytes / 1e9:.3g} GB free"
    )
    if memory.kv_token_nbytes:
        line += f": keys and values of {memory.kv_tokens:,} tokens of {memory.kv_token_nbytes:,} bytes"
    console.print(line, soft_wrap=True)
    table = Table()
    table.add_column("pass")
    table.add_column("ms", justify="right")
    for name, seconds in _examples(profile, memory):
        table.add_row(name, f"{1000 * seconds:.3g}")
    console.print(table)


def _examples(profile: Profile, memory: Memory) -> Iterator[tuple[str, float]]:
    """Some rows of the tables."""
    costs = Costs(profile)
    tokens = sorted({row.item_tokens for row in profile.encode})
    for item_tokens in dict.fromkeys((tokens[0], tokens[len(tokens) // 2], tokens[-1]) if tokens else ()):
        for items in (1, 8):
            yield f"{_number(items, 'item')} of {item_tokens} tokens", costs.encode_s(item_tokens, items).value
    if not profile.prefill:
        return
    longest = max(row.new_tokens for row in profile.prefill)
    for new in _PROMPTS:
        if new <= longest:
            yield f"prompt of {new} tokens", costs.prefill_s(new).value
    context = min(_CONTEXT, longest)
    for batch in _BATCHES:
        if batch * context <= memory.kv_tokens:
            yield f"step of {_number(batch, 'sequence')} of {context} tokens", costs.decode_s(batch, context).value


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
