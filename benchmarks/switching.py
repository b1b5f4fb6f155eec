"""What switching roles while serving gains when the load shifts: EPD-Serve's experiment (section 4.4, table 6), in virtual time.

The real services of a simulated cluster (``tests.simulation``), with a pool manager, over engines that sleep. Eight instances, 5 E, 1 P and
2 D, get requests of one image at 3 per second: the first ten have 50 output tokens, the others 500. ``fixed`` keeps the roles; ``switching``
lets the manager decide (``--switch-roles``); ``from the start`` has the roles that the paper's system ends with (2 E, 1 P, 5 D): a bound.

The engines' costs are assumptions. An image takes 0.46 s of an encoder, after 0.4 s of preparation beside others; a prompt 0.045 s. A decode
step takes 9.5 ms (15.2 GB of weights at 1.6 TB/s), and 3.8 ms for each answer in it: with that, a model of the run without switching has the
paper's latency, 61.1 s. What switching gains is then predicted, not fitted. Keys and values, and
embeddings, move at once; weights are resident.

``alternating`` loads change back and forth every minute, between many images with short answers and few with long ones; ``steady`` does not.

Equal seeds give equal results, on any machine.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from statistics import fmean

from benchmarks import machine
from benchmarks.figures import add_json_option, write_figures
from tests.simulation.cluster import MIB, Engines, SimCluster, World, running
from tests.simulation.scaling import profile_of_decoder, profile_of_encoder
from tests.simulation.workload import Ask, Reply, play
from triptych.cli.bench.report import percentile
from triptych.domain.chat import ChatRequest, MediaPart, Message, Part, TextPart
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import Role
from triptych.machine.encoder.batch_queue import BatchLimits
from triptych.policy.switching import SwitchLimits
from triptych.testing import virtual_time
from triptych.testing.fakes import FAKE_MODEL, FakeEncoderEngine, FakeTextEngine
from triptych.testing.media import png
from triptych.testing.model import WORDS, FakeFamily

_SIDE_PX, _IMAGE_TOKENS = 56, 16
_PROMPT_TOKENS = 25
_MAX_SEQUENCES = 128
_TIMEOUT_S = 1800.0
_SETTLE_S = 2.0
"""Before the first request, so that all have registered."""


@dataclass(frozen=True, slots=True)
class EngineCosts:
    image_s: float = 0.46
    prepare_s: float = 0.4
    prompt_s: float = 0.045
    step_s: float = 0.0095
    sequence_s: float = 0.0038
    """Of each answer in a step."""


COSTS = EngineCosts()
SLO = ("ttft=4s", "tbt=50ms")
FIXED, SWITCHING, FROM_START = "fixed", "switching", "from the start"
FIVE_TWO = (Role.E,) * 5 + (Role.P,) + (Role.D,) * 2
TWO_FIVE = (Role.E,) * 2 + (Role.P,) + (Role.D,) * 5


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests that are alike."""

    per_s: float
    images: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests of each kind one after the other, at equal distances; or, without ``counts``, a minute of each in turn, at random."""

    name: str
    kinds: tuple[Kind, ...]
    counts: tuple[int, ...] = ()
    minutes: int = 6


LOADS = (
    Load("shift", (Kind(3, 1, 50), Kind(3, 1, 500)), counts=(10, 90)),
    Load("alternating, much", (Kind(3, 3, 50), Kind(3, 1, 400))),
    Load("alternating, little", (Kind(4, 2, 20), Kind(1.5, 1, 300))),
    Load("steady", (Kind(3, 1, 50),)),
)


@dataclass(frozen=True, slots=True)
class Settings:
    loads: tuple[Load, ...] = LOADS
    seed: int = 3


QUICK = Settings((Load("shift", (Kind(3, 1, 5), Kind(3, 1, 300)), counts=(10, 30)),))


@dataclass(frozen=True, slots=True)
class Row:
    """Means over all requests."""

    load: str
    row: str
    requests: int
    latency_s: float
    latency_p95_s: float
    ttft_s: float
    tpot_s: float
    switched: tuple[tuple[float, str], ...]
    """When, in seconds after the start, instances opened other stages, and to which role."""


def engines(costs: EngineCosts) -> Engines:
    image_token_s, prompt_token_s = costs.image_s / _IMAGE_TOKENS, (costs.prompt_s - costs.step_s) / _PROMPT_TOKENS

    def encoder(_: str) -> FakeEncoderEngine:
        return FakeEncoderEngine(FakeFamily().tokens, prepare_s=costs.prepare_s, batch_s=0.0, token_s=image_token_s)

    def text(_: str) -> FakeTextEngine:
        return FakeTextEngine(
            WORDS,
            max_running=_MAX_SEQUENCES,
            step_s=costs.step_s,
            sequence_s=costs.sequence_s,
            prefill_token_s=prompt_token_s,
        )

    return Engines(
        encoder,
        text,
        FakeFamily(),
        encoder_profile=profile_of_encoder(0.0, image_token_s),
        decoder_profile=profile_of_decoder(costs.step_s, prompt_token_s, costs.sequence_s),
        prepare_workers=8,
    )


def world(roles: tuple[Role, ...], seed: int, *, switches: bool) -> World:
    return World(
        seed=seed,
        encoders=0,
        texts=0,
        switching_from=roles,
        managers=1,
        profiled=True,
        engines=engines(COSTS),
        encoder_arena_bytes=64 * MIB,
        text_arena_bytes=16 * MIB,
        max_running=_MAX_SEQUENCES,
        router={"slo": SLO},
        encoder={"batches": BatchLimits(max_batch_items=1)},
        manager={"switch_roles": switches},
    )


def asks_of(load: Load, seed: int) -> list[Ask]:
    rng, asks, now_s = Random(f"{seed} {load.name}"), list[Ask](), 0.0
    in_turn = [kind for kind, count in zip(load.kinds, load.counts, strict=False) for _ in range(count)]
    while True:
        if load.counts:
            if len(asks) == len(in_turn):
                return asks
            kind = in_turn[len(asks)]
            now_s += 1 / kind.per_s
        else:
            kind = load.kinds[int(now_s // 60) % len(load.kinds)]
            now_s += rng.expovariate(kind.per_s)
            if now_s >= 60 * load.minutes:
                return asks
        asks.append(Ask(now_s, _request(f"r{len(asks)}", kind, rng)))


def _request(request_id: str, kind: Kind, rng: Random) -> ChatRequest:
    images = [png(_SIDE_PX, _SIDE_PX, seed=rng.randrange(1 << 20)) for _ in range(kind.images)]
    parts: list[Part] = [*(MediaPart(Modality.IMAGE, image) for image in images), TextPart("w7 w8 w9")]
    sampling = SamplingParams(temperature=0, max_tokens=kind.output_tokens, ignore_eos=True)
    return ChatRequest(request_id, FAKE_MODEL.model_id, (Message("user", tuple(parts)),), sampling, _TIMEOUT_S)


async def _watch(cluster: SimCluster, begun_s: float, switched: list[tuple[float, str]]) -> None:
    """Note which instances open other stages, until cancelled."""
    before = {node.name: node.instance.load().stages.keys() for node in cluster.switching}
    while True:
        for node in cluster.switching:
            stages = node.instance.load().stages.keys()
            if stages != before[node.name]:
                switched.append((round(cluster.clock() - begun_s, 1), Role.of(stages).value))
            before[node.name] = stages
        await asyncio.sleep(0.1)


def measured(load: Load, row: str, seed: int) -> Row:
    """Raises AssertionError if a request failed, or something is left of one."""
    roles = TWO_FIVE if row == FROM_START else FIVE_TWO

    async def main() -> Row:
        switched: list[tuple[float, str]] = []
        async with running(world(roles, seed, switches=row == SWITCHING)) as cluster:
            await asyncio.sleep(_SETTLE_S)
            begun_s = cluster.clock()
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(_watch(cluster, begun_s, switched), name="watch-roles")
                replies = await play(cluster.router, asks_of(load, seed))
                watching.cancel()
            await cluster.check_nothing_is_held()
        return _row(load, row, replies, begun_s, switched)

    return virtual_time.run(main(), seed=seed, limit_s=20_000)


def _row(load: Load, row: str, replies: Sequence[Reply], begun_s: float, switched: Sequence[tuple[float, str]]) -> Row:
    latencies, firsts, gaps = list[float](), list[float](), list[float]()
    for reply in replies:
        wanted = reply.ask.request.sampling.max_tokens or 0
        got = len(reply.answers[0].token_ids)
        if reply.error is not None or reply.first_s is None or got != wanted:
            raise AssertionError(f"{reply.ask.request.request_id}: {got} of {wanted} tokens, {reply.error!r}")
        latencies.append(reply.ended_s - begun_s - reply.ask.at_s)
        firsts.append(reply.first_s - begun_s - reply.ask.at_s)
        gaps.append((reply.ended_s - reply.first_s) / max(1, wanted - 1))
    return Row(
        load.name,
        row,
        len(replies),
        round(fmean(latencies), 2),
        round(percentile(latencies, 95), 2),
        round(fmean(firsts), 2),
        round(fmean(gaps), 4),
        tuple(switched),
    )


def show(rows: Sequence[Row]) -> None:
    fixed = {row.load: row for row in rows if row.row == FIXED}
    print(f"{'load':>20} {'':>15} {'latency':>8} {'P95':>8} {'TTFT':>7} {'TPOT':>8}")
    for row in rows:
        print(
            f"{row.load:>20} {row.row:>15} {row.latency_s:>7.2f}s {row.latency_p95_s:>7.2f}s {row.ttft_s:>6.2f}s {1e3 * row.tpot_s:>6.1f}ms"
            f"   {fixed[row.load].latency_s / row.latency_s:.2f} times better than fixed, {len(row.switched)} changes of stages"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="one shift with short answers: shows that it works")
    parser.add_argument("--seed", type=int, default=Settings().seed)
    parser.add_argument("--loads", help="of those above, separated by semicolons")
    arguments = parser.parse_args()
    settings = replace(QUICK if arguments.quick else Settings(), seed=arguments.seed)
    if arguments.loads:
        settings = replace(settings, loads=tuple(one for one in LOADS if one.name in arguments.loads.split(";")))
    described = machine.describe()
    print(f"{described['cpu']}, {described['cores']} cores; {COSTS}; {', '.join(SLO)}; {SwitchLimits()}", flush=True)
    rows: list[Row] = []
    for load in settings.loads:
        for name in (FIXED, SWITCHING, FROM_START) if load.counts else (FIXED, SWITCHING):
            rows.append(measured(load, name, settings.seed))
            print(rows[-1], flush=True)
    show(rows)
    said = {"costs": asdict(COSTS), "objectives": SLO, "limits": asdict(SwitchLimits())}
    write_figures(
        arguments.json,
        {"machine": described, "settings": asdict(settings), **said, "rows": [asdict(row) for row in rows]},
    )


if __name__ == "__main__":
    main()
