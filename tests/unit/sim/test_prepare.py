"""Prompts of planned requests have the tokens and items that the real processor would write."""

from dataclasses import replace

import pytest

from triptych.domain.media import Modality
from triptych.errors import ContextTooLong, InvalidMedia
from triptych.families.base import Span, filled_positions
from triptych.sim.prepare import PlannedPrepare, chat_request
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.model import FakeFamily
from triptych.workload.requests import TEMPLATE_TOKENS, Clip, Planned, Size

FAMILY = FakeFamily(patch_px=14)
PLANNED = Planned(0.0, 20, (Size(28, 28), Size(42, 14)), 5)


def test_a_prompt_has_the_planned_tokens_and_items() -> None:
    prepare = PlannedPrepare(FAMILY)
    request = chat_request(3, PLANNED, FAKE_MODEL.model_id, timeout_s=60.0)
    prepare.expect(request, 3, PLANNED)
    prompted = prepare(request, FAKE_MODEL)
    assert len(prompted.token_ids) == 20 + TEMPLATE_TOKENS + 4 + 3
    assert [item.tokens for item in prompted.items] == [4, 3]
    for item in prompted.items:
        positions = filled_positions(prompted.token_ids, Span(item.start, item.tokens), FAMILY.placeholder_ids)
        assert positions == tuple(range(item.start, item.start + item.tokens))
        assert sum(item.units) == item.tokens
        assert item.info.nbytes == len(item.media)
        assert item.tensors == FAMILY.outputs(item.info, FAKE_MODEL.dtype)
    assert prompted.sampling.max_tokens == 5


def test_no_two_items_or_prompts_are_alike() -> None:
    prepare = PlannedPrepare(FAMILY)
    contents, firsts = set(), set()
    for number in range(50):
        request = chat_request(number, PLANNED, FAKE_MODEL.model_id, timeout_s=60.0)
        prepare.expect(request, number, PLANNED)
        prompted = prepare(request, FAKE_MODEL)
        firsts.add(prompted.token_ids[0])
        contents |= {item.content for item in prompted.items}
    assert (len(firsts), len(contents)) == (50, 100)


@pytest.mark.parametrize(
    ("planned", "error"),
    [
        (replace(PLANNED, text_tokens=FAKE_MODEL.context_length), ContextTooLong),
        (replace(PLANNED, videos=(Clip(Size(8, 8), 1.0),)), InvalidMedia),
    ],
)
def test_what_the_model_does_not_take_is_refused(planned: Planned, error: type[Exception]) -> None:
    prepare = PlannedPrepare(FAMILY)
    request = chat_request(1, planned, FAKE_MODEL.model_id, timeout_s=60.0)
    prepare.expect(request, 1, planned)
    with pytest.raises(error):
        prepare(request, FAKE_MODEL)


def test_videos_and_sounds_are_items_of_their_kind() -> None:
    planned = replace(PLANNED, images=(), videos=(Clip(Size(32, 16), 2.0, 4),), sounds_s=(1.5,))
    media = chat_request(1, planned, "m", timeout_s=1.0).media
    assert [part.modality for part in media] == [Modality.VIDEO, Modality.AUDIO]
