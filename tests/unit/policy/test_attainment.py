import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.item_plan import ItemPlan
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.slo import ChargedStage, Isolated
from triptych.domain.windows import ClassWindow
from triptych.policy.attainment import arrival, charged, wilson

ALONE = Isolated(prepare_s=0.0, encode_s=0.3, prefill_s=0.1, tbt_s=0.02)


@pytest.mark.parametrize(
    ("encode_s", "prefill_s", "stages"),
    [
        (2.0, 0.1, (ChargedStage.ENCODE,)),
        (0.3, 1.9, (ChargedStage.PREFILL,)),
        (1.6, 0.6, (ChargedStage.ENCODE, ChargedStage.PREFILL)),
    ],
)
def test_a_miss_is_charged_to_the_stages_beyond_their_share(
    encode_s: float, prefill_s: float, stages: tuple[ChargedStage, ...]
) -> None:
    assert charged(2.0, ALONE, prepare_s=0.0, encode_s=encode_s, prefill_s=prefill_s) == stages


def test_nothing_is_charged_while_the_shares_are_unknown() -> None:
    assert charged(2.0, None, prepare_s=0.0, encode_s=9.0, prefill_s=9.0) == ()
    assert charged(2.0, Isolated(0.0, 0.0, 0.0, 0.02), prepare_s=0.0, encode_s=9.0, prefill_s=9.0) == ()


def test_a_stage_that_takes_its_share_or_no_time_is_not_charged() -> None:
    assert charged(0.8, ALONE, prepare_s=0.0, encode_s=0.6, prefill_s=0.3) == (ChargedStage.PREFILL,)
    assert charged(0.8, ALONE, prepare_s=0.1, encode_s=0.6, prefill_s=0.2) == (ChargedStage.PREPARE,)


def test_a_request_arrives_in_its_class_with_the_sizes_of_its_items() -> None:
    def item(info: MediaInfo, tokens: int) -> ItemPlan:
        tensors = (TensorSpec("embeds", DType.F32, (tokens, 8)),)
        return ItemPlan(0, "messages[0]", b"", info, (b"", b""), 0, tokens, tensors, 128, (tokens,))

    video = item(MediaInfo(Modality.VIDEO, "mp4", 10, 20, 3000, b"", frames=4), 900)
    sound = item(MediaInfo(Modality.AUDIO, "wav", 0, 0, 500, b"", samples=1600), 100)
    assert arrival((video, sound), 1050) == (
        "video-1024",
        ClassWindow(
            arrivals=1, items=2, media_tokens=1000, media_bytes=3500, pixels=4 * 200 + 1600, prompt_tokens=1050
        ),
    )
    assert arrival((), 7) == ("text", ClassWindow(arrivals=1, prompt_tokens=7))


seconds = st.floats(0.001, 10)


@given(seconds, seconds, seconds, seconds, seconds, seconds, st.floats(0.1, 50))
def test_every_miss_is_charged_to_some_stage(
    a: float, b: float, c: float, x: float, y: float, z: float, limit_s: float
) -> None:
    alone = Isolated(a, b, c, 0.01)
    missed = x + y + z > limit_s * 1.0001
    assert bool(charged(limit_s, alone, prepare_s=x, encode_s=y, prefill_s=z)) or not missed


def test_the_interval_narrows_with_the_number_of_requests() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert 0.2 < wilson(1, 1)[0] < 0.3
    low, high = wilson(1, 100)
    assert (round(low, 4), round(high, 4)) == (0.0022, 0.0436)
    assert wilson(100, 10_000)[0] > low
    assert wilson(100, 10_000)[1] < high


@given(st.integers(0, 100), st.integers(1, 100))
def test_the_interval_contains_the_share(part: int, whole: int) -> None:
    low, high = wilson(min(part, whole), whole)
    assert 0 <= low <= min(part, whole) / whole + 1e-9
    assert min(part, whole) / whole - 1e-9 <= high <= 1
