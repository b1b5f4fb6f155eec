"""Profiles for tests of policies."""

from dataclasses import replace

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

MEASURED = Measured(Origin.MEASURED, "2026-11-22T10:00:00Z", start_s=5.0)
ENCODER_IDENTITY = ProfileIdentity(ModelPart.ENCODER, "ab" * 32, frozenset({Stage.ENCODE}), "cpu a", DType.F32)
DECODER_IDENTITY = replace(ENCODER_IDENTITY, part=ModelPart.DECODER, stages=frozenset({Stage.PREFILL, Stage.DECODE}))
ENCODER = Profile(
    ENCODER_IDENTITY,
    MEASURED,
    # 20 ms per pass and 0.1 ms per token
    encode=tuple(
        EncodeRow(tokens, items, 0.02 + 1e-4 * tokens * items) for tokens in (100, 200, 400) for items in (1, 2, 4, 8)
    ),
    # 1 ns per pixel and 10 ns per byte
    prepare=tuple(
        PrepareRow(round(pixels * density), pixels, 1e-9 * pixels + 1e-8 * round(pixels * density))
        for pixels in (100_000, 1_000_000)
        for density in (0.1, 1.0)
    ),
    transfer=(TransferRow("shm", 1 << 20, 0.001), TransferRow("shm", 1 << 22, 0.004)),
)
DECODER = Profile(
    DECODER_IDENTITY,
    MEASURED,
    # 10 ms per pass and 0.1 ms per token
    prefill=tuple(
        PrefillRow(new, cached, 0.01 + 1e-4 * new + 1e-5 * cached) for new in (16, 256, 2048) for cached in (0, 1024)
    ),
    # 10 ms per step, 1 ms per sequence and 1 us per token of their contexts
    decode=tuple(
        DecodeRow(batch, context, 0.01 + 0.001 * batch + 1e-6 * batch * context)
        for batch in (1, 2, 4, 8, 16, 32)
        for context in (64, 1024, 8192)
    ),
)
