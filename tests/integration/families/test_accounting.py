"""Router, encoder and profile count the same tokens of an image, whatever positions it takes in the prompt."""

import random
from pathlib import Path

import pytest

from tests.integration.families.harness import Item, TinyFamily, random_image
from tests.integration.families.tiny_llava import TINIES as DECODER_ONLY
from tests.integration.families.tiny_mllama import TINIES as CROSS_ATTENTION
from triptych.domain.chat import ChatRequest, MediaPart, Message, TextPart
from triptych.domain.embedding import DType
from triptych.domain.media import Modality
from triptych.domain.slo import Slo
from triptych.domain.stage import ModelPart
from triptych.domain.windows import ClassWindow, merged
from triptych.engine.checkpoint import Checkpoint, open_checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.engine.delay import DelayEncoderEngine, synthetic_profiles
from triptych.engine.profiling import EFFORTS, Options, ProfiledEncoder
from triptych.machine.router.attainment import WindowLimits
from triptych.media.sniff import MediaLimits
from triptych.policy.costs import Costs
from triptych.services.router.attainment import Attainment
from triptych.services.router.prepare import ModelPrepare, Prompted
from triptych.tokens.grammar import Grammars
from triptych.tokens.prompt import PromptBuilder

pytestmark = pytest.mark.timeout(180)

SIDE_PX = 56


@pytest.fixture(params=[DECODER_ONLY[0], CROSS_ATTENTION[0]], ids=["decoder-only", "cross-attention"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    tiny: TinyFamily = request.param
    tiny.make(tmp_path)
    return open_checkpoint(tmp_path)


def prepared(checkpoint: Checkpoint, item: Item | None) -> Prompted:
    builder = PromptBuilder.load(checkpoint.files)
    media = () if item is None else (MediaPart(Modality.IMAGE, item.media),)
    request = ChatRequest("id", "m", (Message("user", (TextPart("w1"), *media)),))
    model = checkpoint.model_info(model_id="m", dtype=DType.F32)
    return ModelPrepare(builder, MediaLimits(), Grammars(builder.tokenizer))(request, model)


def counted(prompted: Prompted) -> ClassWindow:
    """What the router's window report says of this request."""
    now_s = [0.0]
    attainment = Attainment(slo=Slo(), limits=WindowLimits(), epoch=1, clock=lambda: now_s[0])
    attainment.prepared(1, attainment.arrival(prompted.items, len(prompted.token_ids)), 0.0)
    now_s[0] = 1.0
    (window,) = merged(attainment.reports()).values()
    return window


def test_an_encoder_takes_as_long_as_the_profile_says_for_the_tokens_of_the_routers_report(
    checkpoint: Checkpoint,
) -> None:
    item = random_image(random.Random(1), SIDE_PX, SIDE_PX)
    encoder, _ = synthetic_profiles(checkpoint.directory, image_s=0.25, side_px=SIDE_PX)
    costs, slept = Costs(encoder), list[float]()
    engine = DelayEncoderEngine(
        checkpoint.model_info(model_id="m", dtype=DType.F32), checkpoint.family, costs, sleep=slept.append
    )
    engine.encode([engine.prepare(item.media, item.info)])
    media_tokens = counted(prepared(checkpoint, item)).media_tokens
    assert slept[-1] == pytest.approx(costs.encode_s(media_tokens).value) == pytest.approx(0.25)


def test_a_measured_profile_counts_as_the_router_does(checkpoint: Checkpoint) -> None:
    options = Options(checkpoint.directory, ModelPart.ENCODER, ComputeOptions(), 1 << 20, EFFORTS["quick"], 5.0)
    profiled = ProfiledEncoder.load(checkpoint, options)
    places = {task.place[0] for task in profiled.tasks() if task.table == "encode"}
    sides_px = EFFORTS["quick"].sides_px
    items = [random_image(random.Random(1), side_px, side_px) for side_px in sides_px]
    assert places == {counted(prepared(checkpoint, item)).media_tokens for item in items}


def test_only_prompts_of_decoder_only_families_grow_with_their_images(checkpoint: Checkpoint) -> None:
    without = counted(prepared(checkpoint, None)).prompt_tokens
    window = counted(prepared(checkpoint, random_image(random.Random(1), SIDE_PX, SIDE_PX)))
    decoder_only = checkpoint.family.model_type == "llava"
    assert window.prompt_tokens - without == (window.media_tokens if decoder_only else 1)
