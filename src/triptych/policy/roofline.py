"""Cost of a pass on a device, from operations and bytes (roofline model), and the profiles computed from that.

A pass takes::

    pass_s + sequence_s * sequences + max(products + attention, layers * layer_s) + all-reduces

``products`` is the larger of two times: the operations over the peak rate times its efficiency, and the weights that are
read over the memory's bandwidth times its efficiency. ``attention`` is the same of attention with the keys and values that
it reads. With tensor parallelism all are divided by the speedup of the degree, and each layer has two all-reduces of its
rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from triptych.domain.architecture import DecoderArchitecture, EncoderArchitecture, EncoderItem, Work
from triptych.domain.device import Device, Efficiency, Host
from triptych.domain.embedding import DType
from triptych.domain.profile import (
    DecodeRow,
    EncodeRow,
    Measured,
    Origin,
    PrefillRow,
    PrepareRow,
    Profile,
    ProfileIdentity,
    TransferRow,
)
from triptych.domain.stage import ModelPart, Stage
from triptych.policy.transport import NIXL, SHM, TCP

MOST_SEQUENCES = 512
"""Largest batch of decode steps in a profile."""
MOST_ITEMS = 32
RECORDED_ROWS = 512
"""Rows up to which a step with a prompt is replayed as a graph, on devices that start kernels one by one."""
_STEP_TOKENS = 2048
"""Tokens of the largest step, for which activations take memory."""
_SMALLEST_PROMPT = 16
_LEAST_CACHED = 512
"""Smallest number of cached tokens, and the largest prompt after the largest number."""
_QUARTERS = 4
"""Sizes of prompts for each doubling: attention grows with their square, which lines between sizes follow to 1 %."""
_PIXELS = (1 << 12, 1 << 26)
_BYTES_PER_PIXEL = (1 / 16, 4)
"""Exact for these numbers of pixels: rows are on two lines."""
_TRANSFERS = tuple(kib << 10 for kib in (16, 64, 256, 1024, 4096, 16384, 65536))
_REDUCES_PER_LAYER = 2
_DEGREES = (1, 2, 4, 8, 16, 32, 64)


class DoesNotFit(ValueError):
    """A part of a model that a device cannot hold or divide. The message says what is missing, with numbers."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Operations and bytes that one pass computes and reads."""

    work: Work
    weights_nbytes: float
    """Read once."""
    kv_nbytes: int
    """Keys and values that attention reads."""
    rows: int
    depth: int
    row_nbytes: int
    """Bytes of a row that all devices of an instance exchange."""
    sequences: int
    encodes: bool = False
    recorded: bool = False
    """Whether the device replays it as a graph, without starting each kernel."""


@dataclass(frozen=True, slots=True)
class Target:
    """Hardware that a part runs on: ``degree`` devices in tensor parallelism."""

    device: Device
    dtype: DType
    degree: int = 1

    def reaching(self, efficiency: Efficiency) -> Self:
        return replace(self, device=replace(self.device, efficiency=efficiency))

    @property
    def peak_flops_per_s(self) -> float:
        """Raises DoesNotFit for a dtype that the device does not compute in."""
        peak = self.device.flops_per_s.get(self.dtype)
        if peak is None:
            known = ", ".join(sorted(dtype.value for dtype in self.device.flops_per_s))
            raise DoesNotFit(
                f"the catalogue has no rate of {self.device.name} for {self.dtype.value}, only for {known}"
            )
        return peak

    def busy_s(self, each: Pass) -> float:
        """Products, and attention after them."""
        device, reached = self.device, self.device.efficiency
        speedup = device.speedup(self.degree)
        flops_per_s, nbytes_per_s = (
            self.peak_flops_per_s * speedup,
            device.memory_nbytes_per_s * reached.bandwidth * speedup,
        )
        products_s = max(each.work.products / (flops_per_s * reached.compute), each.weights_nbytes / nbytes_per_s)
        attention_s = max(each.work.attention / (flops_per_s * reached.attention), each.kv_nbytes / nbytes_per_s)
        return products_s + attention_s

    def reduce_s(self, each: Pass) -> float:
        """All-reduces of a pass: each device sends and receives a row twice, but for its own share."""
        if self.degree == 1:
            return 0.0
        nbytes = 2 * (self.degree - 1) / self.degree * each.rows * each.row_nbytes
        one_s = self.device.efficiency.reduce_s + nbytes / self.device.device_nbytes_per_s
        return _REDUCES_PER_LAYER * each.depth * one_s

    def pass_s(self, each: Pass) -> float:
        efficiency = self.device.efficiency
        layer_s = efficiency.encode_layer_s if each.encodes else efficiency.layer_s
        started_s = 0.0 if each.recorded else each.depth * layer_s
        fixed_s = efficiency.pass_s + efficiency.sequence_s * each.sequences
        return fixed_s + max(self.busy_s(each), started_s) + self.reduce_s(each)


# --- passes -----------------------------------------------------------------------------------------------------------


def encode_pass(encoder: EncoderArchitecture, item: EncoderItem, items: int, dtype: DType) -> Pass:
    """``items`` equal items."""
    return Pass(
        work=item.work * items,
        weights_nbytes=encoder.parameters * dtype.itemsize,
        kv_nbytes=0,
        rows=item.rows * items,
        depth=encoder.depth,
        row_nbytes=encoder.hidden_size * dtype.itemsize,
        sequences=items,
        encodes=True,
    )


def step_pass(
    decoder: DecoderArchitecture,
    dtype: DType,
    *,
    decodes: int = 0,
    context: int = 0,
    new: int = 0,
    cached: int = 0,
    states: int = 0,
    new_states: int = 0,
) -> Pass:
    """A step that decodes ``decodes`` sequences of ``context`` tokens and computes ``new`` tokens of a prompt.

    The weights are read once for both. With cross-attention all attend to ``states`` states of items each, and ``new_states``
    states of the prompt's items are new.
    """
    work = decoder.decode(decodes, context) if decodes else Work()
    if new:
        work += decoder.prefill(new, cached)
    rows = decodes + new
    kv_nbytes = decodes * decoder.read_kv_nbytes(context, dtype) + (decoder.read_kv_nbytes(cached, dtype) if new else 0)
    parameters = decoder.read_parameters(rows)
    if decoder.cross is not None and states:
        work += decoder.cross.work(rows, states, new_states=new_states)
        parameters += decoder.cross.parameters
        kv_nbytes += (decodes + bool(new)) * states * decoder.cross.state_nbytes(dtype)
    return Pass(
        work=work,
        weights_nbytes=parameters * dtype.itemsize,
        kv_nbytes=kv_nbytes,
        rows=rows,
        depth=decoder.depth,
        row_nbytes=decoder.hidden_size * dtype.itemsize,
        sequences=decodes + bool(new),
        recorded=rows <= RECORDED_ROWS or not new,
    )


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of each device of an instance."""

    weights_nbytes: int
    activations_nbytes: int
    kv_token_nbytes: int
    """0 for an encoder."""
    free_nbytes: int
    """For keys and values, or batches of items."""

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.free_nbytes // self.kv_token_nbytes if self.kv_token_nbytes else 0


def encoder_memory(encoder: EncoderArchitecture, target: Target) -> Memory:
    """Raises DoesNotFit unless weights and the largest item fit."""
    _check_degree(target, encoder.hidden_size, "the encoder's width")
    rows = max((item.rows for item in encoder.items), default=0)
    activations = _activations(rows, encoder.row_values, target)
    return _memory(target, encoder.parameters, activations, what=f"the activations of {rows} rows")


def decoder_memory(decoder: DecoderArchitecture, target: Target) -> Memory:
    """Raises DoesNotFit unless weights, the activations of a step and the keys and values of its tokens fit."""
    _check_degree(target, decoder.heads, "the number of attention heads")
    tokens = min(_STEP_TOKENS, decoder.context_length)
    activations = _activations(tokens, decoder.row_values, target)
    kv_nbytes = decoder.kv_token_nbytes(target.dtype) // min(target.degree, decoder.kv_heads)
    what = f"the activations, keys and values of {tokens} tokens"
    return _memory(target, decoder.parameters, activations, kv_nbytes, tokens, what=what)


def least_degree(decoder: DecoderArchitecture, target: Target) -> int | None:
    """The least tensor-parallel degree at which the decoder fits such devices; None if there is none up to 64."""

    def fits(degree: int) -> bool:
        try:
            decoder_memory(decoder, replace(target, degree=degree))
        except DoesNotFit:
            return False
        return True

    return next(filter(fits, _DEGREES), None)


def _activations(rows: int, row_values: int, target: Target) -> int:
    return rows * row_values * target.dtype.itemsize // target.degree


def _memory(
    target: Target, parameters: int, activations: int, kv_nbytes: int = 0, tokens: int = 0, *, what: str
) -> Memory:
    weights = parameters * target.dtype.itemsize // target.degree
    free = target.device.usable_nbytes - weights - activations
    if free < kv_nbytes * tokens:
        raise DoesNotFit(
            f"{target.degree} x {target.device.name} cannot hold it: weights take {weights / 1e9:.1f} GB of each device and "
            f"{what} {(activations + kv_nbytes * tokens) / 1e9:.1f} GB, of {target.device.usable_nbytes / 1e9:.1f} GB that "
            f"engines use of {target.device.memory_nbytes / 1e9:.0f} GB"
        )
    return Memory(weights, activations, kv_nbytes, free)


def _check_degree(target: Target, divided: int, what: str) -> None:
    if divided % target.degree:
        raise DoesNotFit(f"a tensor-parallel degree of {target.degree} does not divide {what}, {divided}")


# --- profiles ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Origins:
    """Identity of a computed profile, and where its figures come from."""

    digest: str
    at: str
    """ISO 8601, UTC."""
    method: str


def encoder_profile(encoder: EncoderArchitecture, target: Target, host: Host, origins: Origins) -> Profile:
    """Raises DoesNotFit."""
    memory = encoder_memory(encoder, target)
    item_nbytes = max((_activations(item.rows, encoder.row_values, target) for item in encoder.items), default=0)
    fitting = min(MOST_ITEMS, 1 + memory.free_nbytes // max(1, item_nbytes))
    encode = tuple(
        EncodeRow(item.tokens, items, target.pass_s(encode_pass(encoder, item, items, target.dtype)))
        for item in encoder.items
        for items in _sizes(1, fitting, 2)
    )
    largest = max(encoder.items, key=lambda item: item.tokens, default=None)
    token_nbytes = 0 if largest is None else largest.nbytes // max(1, largest.tokens)
    return Profile(
        _identity(ModelPart.ENCODER, frozenset({Stage.ENCODE}), target, origins),
        _measured(target, host, origins, encoder.parameters, output_token_nbytes=token_nbytes),
        encode=encode,
        prepare=tuple(_prepare(host)),
        transfer=tuple(_transfers(target.device, host)),
    )


def decoder_profile(decoder: DecoderArchitecture, target: Target, host: Host, origins: Origins) -> Profile:
    """Rows for which keys and values fit. Layers with cross-attention are left out, as prompts without items skip them.

    Raises DoesNotFit.
    """
    dtype, kv_tokens = target.dtype, decoder_memory(decoder, target).kv_tokens
    longest = min(decoder.context_length, kv_tokens)
    prefill = tuple(
        PrefillRow(new, cached, target.pass_s(step_pass(decoder, dtype, new=new, cached=cached)))
        for cached in (0, *_sizes(_LEAST_CACHED, longest - _LEAST_CACHED, 1))
        for new in _sizes(_SMALLEST_PROMPT, longest - cached, _QUARTERS)
    )
    decode = tuple(
        DecodeRow(batch, context, target.pass_s(step_pass(decoder, dtype, decodes=batch, context=context)))
        for batch in _sizes(1, MOST_SEQUENCES, 2)
        for context in _sizes(_SMALLEST_PROMPT, min(longest, kv_tokens // batch), 1)
    )
    return Profile(
        _identity(ModelPart.DECODER, frozenset({Stage.PREFILL, Stage.DECODE}), target, origins),
        _measured(target, host, origins, decoder.parameters, kv_token_nbytes=decoder.kv_token_nbytes(dtype)),
        prefill=prefill,
        decode=decode,
    )


def _identity(part: ModelPart, stages: frozenset[Stage], target: Target, origins: Origins) -> ProfileIdentity:
    hardware = target.device.hardware[0]
    return ProfileIdentity(part, origins.digest, stages, hardware, target.dtype, target.degree, software="analytic")


def _measured(target: Target, host: Host, origins: Origins, parameters: int, **token_nbytes: int) -> Measured:
    weights = parameters * target.dtype.itemsize
    rate = min(host.disk_nbytes_per_s, target.degree * target.device.host_nbytes_per_s)
    load_s = weights / rate
    return Measured(
        Origin.SYNTHETIC,
        origins.at,
        method=origins.method,
        weights_nbytes=weights,
        load_s=load_s,
        start_s=host.process_s + load_s,
        **token_nbytes,
    )


def _prepare(host: Host) -> Iterator[PrepareRow]:
    """Few and many pixels (or samples), with few and many bytes each: between them the time is linear."""
    for pixels in _PIXELS:
        for density in _BYTES_PER_PIXEL:
            nbytes = int(density * pixels)
            seconds = host.prepare_s + host.prepare_s_per_pixel * pixels + host.prepare_s_per_byte * nbytes
            yield PrepareRow(nbytes, pixels, seconds)


def _transfers(device: Device, host: Host) -> Iterator[TransferRow]:
    rates = {
        SHM: host.shm_nbytes_per_s,
        NIXL: host.nixl_nbytes_per_s,
        TCP: min(host.tcp_nbytes_per_s, device.network_nbytes_per_s),
    }
    for backend, rate in rates.items():
        for nbytes in _TRANSFERS:
            yield TransferRow(backend, nbytes, host.transfer_s + nbytes / rate)


def _sizes(least: int, most: int, per_doubling: int) -> tuple[int, ...]:
    """Numbers from ``least`` to ``most``, so many for each doubling, and ``most`` itself."""
    if most < least:
        return ()
    sizes, number = {most}, 0
    while (size := round(least * 2 ** (number / per_doubling))) < most:
        sizes.add(size)
        number += 1
    return tuple(sorted(sizes))
