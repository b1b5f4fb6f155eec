"""When it pays to pull the prefix of a prompt from another instance instead of computing it (policy ``prefixes``), in virtual time.

The real services of a simulated cluster (``tests.simulation``) over engines that sleep as the ``decoder-only`` model of
``benchmarks.routing_models`` would take, with a prefix cache: chats of some turns begin at random, all with the same system prompt. Each
turn has the turns before in its prompt, and goes to the text instance with least to do. With ``never`` that one computes what it has not
cached; with ``by-cost`` it pulls what others have computed, answers included.

A token's keys and values have 0.2 MB and are pulled at ``link_gb_per_s``; copies within an instance take no time worth counting. Rows are
for tokens of the system prompt, a rate of the link, and a load: the share of what the pool could do if every prompt were computed whole.
``computed`` is the share of the prompts' tokens that were computed, ``pulled`` that of those pulled; the rest was cached. Equal seeds
give equal results, on any machine. What the router spends more is in them only as round trips of 0.4 to 4 ms.
"""

import argparse
import asyncio
import random
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from benchmarks.routing_models import MODELS, Model
from tests.simulation.cluster import MIB, Engines, SimCluster, World, running
from tests.simulation.workload import Ask, play
from triptych.domain.chat import ChatRequest, Message, TextPart
from triptych.domain.profile import Profile, TransferRow
from triptych.domain.sampling import SamplingParams
from triptych.domain.timeline import Timeline
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.delay import DelayEncoderEngine, DelayTextEngine
from triptych.policy.costs import Costs
from triptych.policy.policies import PolicyNames
from triptych.policy.transport import MEMORY
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.model import WORDS
from triptych.virtual import virtual_time
from triptych.virtual.offload import spend
from triptych.workload.report import percentile

POLICIES = ("never", "by-cost")
_MODEL: Model = MODELS["decoder-only"]
_TOKEN_NBYTES = 200_000
_TURN_TOKENS, _ANSWER_TOKENS = 300, 200
_PAUSE_S = 10.0
"""Mean time between an answer and the next turn."""
_TEXTS = 4
_PREFIX_TOKENS = 1 << 16
"""Of the prefix cache of a text instance."""


@dataclass(frozen=True, slots=True)
class Settings:
    chats: int = 40
    turns: int = 3
    system_tokens: tuple[int, ...] = (0, 2000)
    link_gb_per_s: tuple[float, ...] = (1.0, 10.0)
    loads: tuple[float, ...] = (0.5,)
    seed: int = 7


QUICK = Settings(chats=12, turns=3, system_tokens=(1000,), link_gb_per_s=(10.0,), loads=(0.5,))


@dataclass(frozen=True, slots=True)
class Shape:
    system_tokens: int
    link_gb_per_s: float
    load: float


@dataclass(frozen=True, slots=True)
class Row:
    """Times in milliseconds. Later turns are all but the first of each chat."""

    shape: Shape
    prefixes: str
    first_ttft_mean_ms: float
    later_ttft_mean_ms: float
    later_ttft_p99_ms: float
    computed: float
    pulled: float


def pull_byte_s(shape: Shape) -> float:
    """The engines' keys and values are small, and their bytes as slow."""
    position_nbytes = _text_engine().kv.kind.position_nbytes
    return _TOKEN_NBYTES / (shape.link_gb_per_s * 1e9) / position_nbytes


def _text_engine() -> DelayTextEngine:
    served = replace(FAKE_MODEL, context_length=_MODEL.family.context_length)
    options = EngineOptions(max_sequences=64)
    costs = Costs(_MODEL.profiles[1])
    return DelayTextEngine(served, _MODEL.family, costs, options, prefix_tokens=_PREFIX_TOKENS, sleep=spend)


def engines(shape: Shape) -> Engines:
    encoder, decoder = _MODEL.profiles
    byte_s = pull_byte_s(shape)
    pulls = tuple(TransferRow(MEMORY, nbytes, byte_s * nbytes) for nbytes in (1, 1 << 20))
    told: Profile = replace(encoder, transfer=pulls)
    served = replace(FAKE_MODEL, context_length=_MODEL.family.context_length)
    return Engines(
        lambda _: DelayEncoderEngine(served, _MODEL.family, Costs(told), sleep=spend),
        lambda _: _text_engine(),
        family=_MODEL.family,
        encoder_profile=told,
        decoder_profile=decoder,
        prepare_workers=8,
    )


def chats_per_s(shape: Shape, settings: Settings) -> float:
    """At which the pool has this share of work, by what requests take if every prompt is computed whole."""
    decoder, work_s = Costs(_MODEL.profiles[1]), 0.0
    for turn in range(settings.turns):
        prompt = shape.system_tokens + turn * (_TURN_TOKENS + _ANSWER_TOKENS) + _TURN_TOKENS
        work_s += decoder.prefill_s(prompt, 0).value + _ANSWER_TOKENS * decoder.decode_s(8, prompt).value / 8
    return shape.load * _TEXTS / work_s


def _words(rng: random.Random, count: int) -> TextPart:
    return TextPart(" ".join(f"w{word}" for word in rng.choices(WORDS, k=count)))


async def _chat(cluster: SimCluster, shape: Shape, settings: Settings, number: int, at_s: float) -> None:
    rng, system = random.Random(f"{settings.seed}/{shape}/{number}"), random.Random("system")
    messages: tuple[Message, ...] = ()
    if shape.system_tokens:
        messages = (Message("user", (_words(system, shape.system_tokens),)),)
    await asyncio.sleep(at_s)
    for turn in range(settings.turns):
        messages += (Message("user", (_words(rng, _TURN_TOKENS),)),)
        sampling = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, seed=number, ignore_eos=True)
        request = ChatRequest(f"{number}-{turn}", FAKE_MODEL.model_id, messages, sampling, timeout_s=600.0)
        (reply,) = await play(cluster.router, [Ask(0.0, request)])
        assert reply.error is None, reply.error
        answer = " ".join(f"w{token}" for token in reply.answers[0].token_ids)
        messages += (Message("assistant", (TextPart(answer),)),)
        await asyncio.sleep(rng.expovariate(1 / _PAUSE_S))


def run(shape: Shape, prefixes: str, settings: Settings) -> Row:
    """One row. Raises AssertionError if a request fails or anything is still held afterwards."""
    world = World(
        seed=settings.seed,
        encoders=1,
        texts=_TEXTS,
        kv_arena_bytes=64 * MIB,
        engines=engines(shape),
        profiled=True,
        pull_byte_s=pull_byte_s(shape),
        text={"kv_prefixes": prefixes != "never"},
        router={"policies": PolicyNames(prefixes=prefixes), "history_requests": settings.chats * settings.turns},
    )
    lines, cached = virtual_time.run(_played(world, shape, settings), seed=settings.seed, limit_s=7200)
    firsts = [1000 * line.ttft_s for line in lines if line.request_id.endswith("-0")]
    later = [1000 * line.ttft_s for line in lines if not line.request_id.endswith("-0")]
    tokens, pulled = sum(line.prompt_tokens for line in lines), sum(line.prefix_tokens for line in lines)
    return Row(
        shape,
        prefixes,
        mean(firsts),
        mean(later),
        percentile(later, 99),
        computed=(tokens - cached - pulled) / tokens,
        pulled=pulled / tokens,
    )


async def _played(world: World, shape: Shape, settings: Settings) -> tuple[list[Timeline], int]:
    """What became of the requests, and the tokens of prompts that instances had cached."""
    rng, at_s = random.Random(f"{settings.seed}/{shape}"), 0.0
    async with running(world) as cluster:
        async with asyncio.TaskGroup() as group:
            for number in range(settings.chats):
                at_s += rng.expovariate(chats_per_s(shape, settings))
                group.create_task(_chat(cluster, shape, settings, number, at_s))
        names = [f"{number}-{turn}" for number in range(settings.chats) for turn in range(settings.turns)]
        lines = [await cluster.router.timeline(name) for name in names]
        cached = sum(node.engine.prefix_hits_tokens for node in cluster.texts)
        await cluster.check_nothing_is_held()
    return lines, cached


def measure(settings: Settings) -> dict[str, Any]:
    rows: list[Row] = []
    for system_tokens in settings.system_tokens:
        for link in settings.link_gb_per_s:
            for load in settings.loads:
                shape = Shape(system_tokens, link, load)
                both = [run(shape, prefixes, settings) for prefixes in POLICIES]
                _show(*both)
                rows += both
    return {"machine": machine.describe(), "settings": asdict(settings), "rows": [asdict(row) for row in rows]}


def _show(never: Row, by_cost: Row) -> None:
    shape = never.shape
    print(
        f"system prompt {shape.system_tokens:5d}  link {shape.link_gb_per_s:4.1f} GB/s  load {shape.load:3.0%}  "
        f"first TTFT {never.first_ttft_mean_ms:5.0f} -> {by_cost.first_ttft_mean_ms:5.0f} ms  "
        f"later TTFT {never.later_ttft_mean_ms:5.0f} -> {by_cost.later_ttft_mean_ms:5.0f} ms mean, "
        f"{never.later_ttft_p99_ms:5.0f} -> {by_cost.later_ttft_p99_ms:5.0f} p99  "
        f"computed {never.computed:4.0%} -> {by_cost.computed:4.0%}, pulled {by_cost.pulled:4.0%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="few chats, one shape: shows that it works")
    arguments = parser.parse_args()
    write_figures(arguments.json, measure(QUICK if arguments.quick else Settings()))


if __name__ == "__main__":
    ending.by_sigterm()
    main()
