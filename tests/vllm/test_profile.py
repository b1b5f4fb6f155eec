"""A decoder that vLLM runs is profiled as its instances run it, and what bounds its steps is known without it."""

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.usage.usage_lib import UsageContext

from tests.contract.text_engine_kit import VLLM_ARGS, checkpoint
from tests.vllm.reference import ROOT
from triptych.cli.child import child_command
from triptych.domain.embedding import DType
from triptych.domain.stage import ModelPart
from triptych.engine.compute import ComputeOptions
from triptych.engine.profiling import EFFORTS, Options, Profiled, measure_tables
from triptych.families.architecture import Architecture
from triptych.integrations.vllm.arguments import engine_args
from triptych.integrations.vllm.limits import engine_limits
from triptych.integrations.vllm.profiling import load_decoder
from triptych.integrations.vllm.starting import vllm_identity
from triptych.policy.costs import Costs
from triptych.runtime.catalogue import at_hand, load_catalogue
from triptych.runtime.profiles import read_profiles

pytestmark = pytest.mark.timeout(300)

COMPUTE = ComputeOptions()
ARGUMENTS = f"{VLLM_ARGS} --max-num-seqs 4 --max-num-batched-tokens 64"
EFFORT = replace(EFFORTS["quick"], prompts=(32, 128), cached=(0, 64), batches=(1, 4, 8), contexts=(16, 100))


@pytest.fixture(scope="module")
def profiled() -> Iterator[Profiled]:
    made = load_decoder(checkpoint(), Options(Path(), ModelPart.DECODER, COMPUTE, 0, EFFORT, 5.0, ARGUMENTS))
    yield made
    made.loaded.close()


def test_a_decoder_is_found_by_the_arguments_of_its_instances(profiled: Profiled) -> None:
    of_instances = vllm_identity(
        checkpoint(),
        ModelPart.DECODER,
        COMPUTE,
        options=(
            "--block-size=32 --enforce-eager=True --kv-cache-memory-bytes=67108864 --max-num-batched-tokens=64 "
            "--max-num-seqs=4"
        ),
    )
    assert profiled.loaded.identity == of_instances
    assert profiled.loaded.identity.engine == "vllm"
    decoder = Architecture.load(checkpoint().files).decoder
    assert profiled.facts["kv_token_nbytes"] == decoder.kv_token_nbytes(DType.F32)


def test_prompts_beyond_a_step_of_the_instances_and_batches_up_to_theirs_are_measured(profiled: Profiled) -> None:
    rows: dict[str, dict[tuple[int, int], float]] = {}

    def take(report: Mapping[str, Any]) -> None:
        if report["kind"] == "row":
            rows.setdefault(report["table"], {})[report["place"]] = report["seconds"]

    measure_tables(profiled, None, 60.0, take)
    assert rows["prefill"].keys() == {(new, cached) for new in (32, 128) for cached in (0, 64)}
    assert rows["decode"].keys() == {(batch, context) for batch in (1, 4) for context in (16, 100)}
    assert all(0 < seconds < 60 for table in rows.values() for seconds in table.values())


@pytest.mark.parametrize(
    "arguments", ["", "--max-num-seqs 8", "--max-num-batched-tokens 4k --max-num-active-seqs 3", "--max-model-len 64"]
)
def test_what_bounds_steps_is_known_without_vllm(arguments: str) -> None:
    made = engine_args(arguments, checkpoint(), model_id="m", compute=COMPUTE)
    config = made.create_engine_config(UsageContext.OPENAI_API_SERVER)
    scheduler = config.scheduler_config
    device = at_hand(load_catalogue(None).device("cpu"), 1)
    found = engine_limits(
        arguments, device, degree=1, context_tokens=checkpoint().family.context_length, is_measured=True
    )
    active = scheduler.max_num_active_seqs or scheduler.max_num_seqs
    assert found.max_sequences == min(active, scheduler.max_num_seqs)
    assert found.token_budget == scheduler.max_num_batched_tokens
    assert found.context_tokens == config.model_config.max_model_len


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--engine=vllm", "--vllm-args=--enable-lora"), "--enable-lora cannot be set"),
        (("--engine=vllm", f"--vllm-args={VLLM_ARGS} --no-enable-prefix-caching"), "its prefix cache is off"),
        (("--engine=vllm", "--model", "missing"), "missing"),
        (("--engine=vllm", "--device=cuda"), "vLLM chooses its devices itself"),
        (("--vllm-args=--seed 1",), "--vllm-args goes with --engine vllm"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    ended = profile(tmp_path, "--part=decoder", *options)
    assert ended.returncode != 0
    assert said in ended.stdout + ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.extended
def test_both_parts_are_profiled_by_the_command(tmp_path: Path) -> None:
    arguments = ("--engine=vllm", f"--vllm-args={VLLM_ARGS}", "--encoder-engine=vllm")
    ended = profile(tmp_path, "--quick", *arguments)
    assert ended.returncode in (0, 1), ended.stderr  # 1: the machine's speed changed
    profiles, faults = read_profiles(tmp_path)
    assert not faults
    assert {found.identity.part for found in profiles} == set(ModelPart)
    assert all(found.identity.engine == "vllm" and found.file_name.endswith("-vllm.json") for found in profiles)
    costs = {found.identity.part: Costs(found) for found in profiles}
    assert costs[ModelPart.DECODER].step_s(4, 100, [(64, 0)]).value > costs[ModelPart.DECODER].decode_s(1, 16).value > 0
    assert costs[ModelPart.ENCODER].encode_s(16, 2).value > 0


def profile(out: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = child_command("triptych.cli", "profile", "--out", str(out), *options)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
