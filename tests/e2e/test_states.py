"""A decoder with linear attention in instances of its own for each stage: the state of a prompt goes from prefill to decode."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import rest, stream_message
from tests.e2e.test_answers import assert_no_stacks
from tests.e2e.test_continuations import timeline
from tests.integration.families.harness import Case, Question, Unclear, message_of
from tests.models.conftest import ZOO
from triptych.cli.cluster import LocalCluster
from triptych.rpc.stubs import RouterStub

MODEL_ID = "tiny"
ANSWER_TOKENS = 12


def never(*_: object) -> Any:
    raise AssertionError("the cluster encodes")


def clear_question(case: Case, seed: int, items: int) -> Question:
    for attempt in range(100):
        question = case.question(seed + 10 * attempt, items)
        with suppress(Unclear):
            case.answer(question, ANSWER_TOKENS)
            return question
    raise AssertionError("no question has a clear answer")


@pytest.mark.asyncio
@pytest.mark.timeout(240)
async def test_encode_prefill_and_decode_apart_answer_as_generate_does(tmp_path: Path) -> None:
    tiny = ZOO["qwen3_5"]
    directory = tmp_path / MODEL_ID
    directory.mkdir()
    tiny.make(directory)
    case = Case(tiny, directory, never)
    logs = tmp_path / "logs"
    async with LocalCluster(directory, roles="E:1,P:1,D:1", log_dir=logs) as cluster, rest(cluster.url) as http:
        router = RouterStub(cluster.router_target)
        for number, items in enumerate((1, 0, 2)):
            question = clear_question(case, number, items)
            name = f"state-{number}"
            got = await stream_message(router, name, MODEL_ID, message_of(question), ANSWER_TOKENS)
            assert list(got.token_ids) == case.answer(question, ANSWER_TOKENS)
            told = await timeline(http, name)
            assert (told["prefill_instance"], told["text_instance"]) == ("prefill-1", "decode-1")
            assert told["kv_pulled_tokens"] > 0
            assert told["kv_computed_tokens"] == 0, "what the prompt computed is not computed again"
        await router.close()
    assert_no_stacks(logs)
