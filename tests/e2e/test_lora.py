"""LoRA adapters of real processes, each stage in an instance of its own: answers are those of the models that they are merged into."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch

from tests.command_line import invoke
from tests.e2e.client import post, rest, text_of, timeline_of
from tests.e2e.reference import Question, answer, hf, questions
from tests.e2e.test_answers import assert_no_stacks
from tests.unit.engine.loras import VISION, make_lora
from triptych.cli.cluster import LocalCluster
from triptych.client import AsyncClient
from triptych.demo import MODEL_DIR, MODEL_ID

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = questions((0, 1, 2), 6)
LOOKS = 600
"""At a log, each after a tenth of a second."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With adapters ``one``, ``two`` and ``three`` of the language model, and ``both``, of the encoder too."""
    directory = tmp_path_factory.mktemp("loras")
    model: Any = hf.LlavaForConditionalGeneration.from_pretrained(MODEL_DIR, dtype=torch.float32)
    for seed, name in enumerate(("one", "two", "three"), start=1):
        make_lora(directory / name, model.model.language_model, seed=seed, rank=4 * seed, strength=0.1)
    vision = {VISION: model.model.vision_tower}
    targets = ("q_proj", "v_proj", "fc1")
    make_lora(directory / "both", model.model.language_model, seed=4, targets=targets, strength=0.1, encoders=vision)
    return directory


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(root: Path, logs: Path) -> AsyncIterator[LocalCluster]:
    options = {
        "encoder": ("--lora-root", str(root)),
        "text": ("--lora", f"one={root / 'one'}", "--lora-root", str(root), "--kv-prefixes"),
    }
    async with LocalCluster(roles="E:1,P:1,D:1", options=options, log_dir=logs) as running:
        yield running
    assert_no_stacks(logs)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: LocalCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with rest(cluster.url) as client:
        yield client


async def served(http: httpx.AsyncClient) -> dict[str, str | None]:
    """The models, with their parents."""
    return {model["id"]: model["parent"] for model in (await http.get("/v1/models")).json()["data"]}


async def command(cluster: LocalCluster, *arguments: str) -> str:
    result = await asyncio.to_thread(invoke, ["lora", *arguments, "--url", cluster.url])
    assert result.exit_code == 0, result.output
    return result.output


async def test_adapters_and_their_base_answer_together_as_their_merged_models(
    cluster: LocalCluster, http: httpx.AsyncClient, root: Path
) -> None:
    assert await served(http) == {MODEL_ID: None, "one": MODEL_ID}
    assert "two is served" in await command(cluster, "load", "two=two")
    assert await served(http) == {MODEL_ID: None, "one": MODEL_ID, "two": MODEL_ID}
    assert f"two  of {MODEL_ID}" in await command(cluster, "list")
    names: dict[str, Path | None] = {MODEL_ID: None, "one": root / "one", "two": root / "two"}
    asked = [(name, question) for question in ASKED for name in names] * 2
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(post(http, question.body(model=name))) for name, question in asked]
    for task, (name, question) in zip(tasks, asked, strict=True):
        assert text_of(task.result()) == answer(question, names[name]).text, (name, question)
        timeline = await timeline_of(http, task.result())
        assert (timeline["model"], timeline["prefill_instance"], timeline["text_instance"]) == (
            name,
            "prefill-1",
            "decode-1",
        )
        assert timeline["kv_pulled_tokens"] + timeline["kv_cached_tokens"] > 0
    async with httpx.AsyncClient(trust_env=False) as client:
        metrics = (await client.get(f"{cluster.admin_urls['router']}/metrics")).text
    assert f'model_name="{MODEL_ID}"' in metrics
    assert 'model_name="one"' not in metrics, "their labels would grow with names"
    async with AsyncClient(cluster.router_target) as client:
        assert [model.model_id for model in await client.models()] == [MODEL_ID, "one", "two"]
        told = await client.chat("Hello!", model="two", temperature=0, max_tokens=40)
    assert told.text == answer(Question("Hello!"), root / "two").text


async def test_an_adapter_of_both_parts_answers_as_its_merged_model_and_shares_no_embeddings_with_others(
    cluster: LocalCluster, http: httpx.AsyncClient, root: Path, logs: Path
) -> None:
    await command(cluster, "load", "both=both")
    for question in ASKED[1:3]:
        for name in (MODEL_ID, "both", "one", "both"):
            lora = None if name == MODEL_ID else root / name
            response = await post(http, question.body(model=name))
            assert text_of(response) == answer(question, lora).text, (name, question)
    await command(cluster, "unload", "both")
    for instance in ("encoder-1", "prefill-1", "decode-1"):
        await until_free("both", logs / f"{instance}.log")
    assert (await post(http, ASKED[1].body(model="both"))).status_code == 404


async def until_free(name: str, log: Path) -> None:
    """Wait until an instance has given an adapter's memory back."""
    for _ in range(LOOKS):
        if f"the memory of LoRA adapter {name} is free" in await asyncio.to_thread(log.read_text):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{log.name} does not say that adapter {name} is free")


async def test_requests_that_run_end_after_an_unload_and_other_files_under_the_name_are_another_adapter(
    cluster: LocalCluster, http: httpx.AsyncClient, root: Path, logs: Path
) -> None:
    question = Question("What digits are shown?", ("3_a", "9_c"))
    if "two" not in await served(http):
        await command(cluster, "load", "two=two")
    long = question.body(model="two", ignore_eos=True, max_tokens=500, stream=True)
    async with http.stream("POST", "/v1/chat/completions", json=long) as running:
        lines = running.aiter_lines()
        await anext(lines)
        assert "two takes no more requests" in await command(cluster, "unload", "two")
        refused = await post(http, question.body(model="two"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        written = [line async for line in lines if line]
    assert (written[-1], "length" in written[-2]) == ("data: [DONE]", True), written[-2:]
    assert len(written) > 4, "it went on after the unload"
    for instance in ("prefill-1", "decode-1"):
        await until_free("two", logs / f"{instance}.log")
    shutil.copytree(root / "three", root / "other")
    await command(cluster, "load", "two=other")
    assert text_of(await post(http, question.body(model="two"))) == answer(question, root / "three").text


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("one", "two", "loaded already"),
        (MODEL_ID, "two", "name of the base model"),
        ("four", "../logs", "below lora_root"),
        ("four", "/etc", "below lora_root"),
        ("four", "missing", "below lora_root"),
        ("-", "two", "begins with a letter"),
    ],
)
async def test_orders_that_cannot_be_carried_out_are_refused_with_their_reason(
    http: httpx.AsyncClient, name: str, path: str, message: str
) -> None:
    response = await http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
    assert (response.status_code, message in response.text) == (400, True), response.text
    assert "four" not in await served(http)
