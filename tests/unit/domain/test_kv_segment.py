"""Positions are cut on a grid that depends on the kind alone."""

import pytest

from triptych.domain.embedding import DType
from triptych.domain.kv_segment import KvKind, KvSegment

SMALL = KvKind("model", DType.F32, layers=1, heads=1, head_size=4)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        (SMALL, 256),
        (KvKind("7B", DType.BF16, layers=32, heads=8, head_size=128), 64),
        (KvKind("2B", DType.BF16, layers=28, heads=2, head_size=128), 256),
        (KvKind("70B", DType.F32, layers=80, heads=64, head_size=128), 64),
    ],
)
def test_a_segment_has_up_to_8_mib_and_64_to_256_positions(kind: KvKind, tokens: int) -> None:
    assert kind.segment_tokens == tokens


@pytest.mark.parametrize(
    ("first", "end", "cut"),
    [
        (0, 0, []),
        (0, 10, [(0, 10)]),
        (0, 256, [(0, 256)]),
        (0, 600, [(0, 256), (256, 512), (512, 600)]),
        (250, 260, [(250, 256), (256, 260)]),
        (256, 257, [(256, 257)]),
    ],
)
def test_positions_are_cut_at_the_multiples(first: int, end: int, cut: list[tuple[int, int]]) -> None:
    assert [(segment.first, segment.end) for segment in SMALL.segments(first, end)] == cut


def test_the_payload_is_its_one_tensor() -> None:
    segment = KvSegment(SMALL, 3, 5)
    assert segment.spec.nbytes == segment.nbytes == 5 * 32
    assert segment.key(b"x") != KvSegment(SMALL, 2, 6).key(b"x") != segment.key(b"y")
