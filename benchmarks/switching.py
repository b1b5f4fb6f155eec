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

With ``--processes`` the load ``shift`` is also replayed at local clusters of real processes (``triptych up --switch-roles``) whose engines sleep for the
same times (``--delay-profile``); the clients run in the benchmark's own process. That takes as long as the answers do, and depends on the machine.
"""

import argparse
import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import fsum
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Self

import psutil
import uvloop

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from tests.simulation.cluster import MIB, Engines, SimCluster, World, running
from tests.simulation.scaling import profile_of_decoder, profile_of_encoder
from tests.simulation.workload import Ask, Reply, play
from triptych.cli.bench import load as bench
from triptych.cli.bench.payload import Style
from triptych.cli.cluster import LocalCluster
from triptych.domain.chat import ChatRequest, MediaPart, Message, Part, TextPart
from triptych.domain.media import Modality
from triptych.domain.profile import PrefillRow
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import Role
from triptych.engine.delay import synthetic_decoder_profile, synthetic_encoder_profile
from triptych.errors import TriptychError
from triptych.machine.encoder.batch_queue import BatchLimits
from triptych.policy.switching import SwitchLimits
from triptych.rpc.stubs import PoolManagerStub
from triptych.runtime.profiles import write_profile
from triptych.testing.delay_models import Attention, write_delay_model
from triptych.testing.fakes import FAKE_MODEL, FakeEncoderEngine, FakeTextEngine
from triptych.testing.media import png
from triptych.testing.model import WORDS, FakeFamily
from triptych.virtual import virtual_time
from triptych.workload.report import Record, percentile
from triptych.workload.requests import Planned, Size

_SIDE_PX, _IMAGE_TOKENS = 56, 16
_PROMPT_TOKENS = 25
_MAX_SEQUENCES = 128
_PREPARE_WORKERS = 8
_TIMEOUT_S = 1800.0
_PATIENCE_S = 600.0
"""Of real clients and gateways, which allow no more."""
_MODEL = "shift"
_LEAST_PROMPT = 64
"""Tokens of the real prompts, or fewer: each costs the same."""
_ENCODER = ("--max-batch-items", "1", "--prepare-threads", str(_PREPARE_WORKERS), "--arena-bytes", str(64 << 20))
_TEXT = ("--max-sequences", str(_MAX_SEQUENCES), "--image-cache-bytes", str(64 << 20))
_POLL_S = 0.25
_SLEEP_S = 0.1
"""About as long as a step."""
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
    rows: tuple[str, ...] = (FIXED, SWITCHING, FROM_START)
    """Of loads that shift."""


QUICK = Settings((Load("shift", (Kind(3, 1, 5), Kind(3, 1, 300)), counts=(10, 30)),))
QUICK_PROCESSES = Settings((Load("shift", (Kind(3, 1, 5), Kind(3, 1, 30)), counts=(4, 8)),), rows=(SWITCHING,))


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


Times = tuple[float, float, float]
"""Of a request: latency, time to the first token, time per token after it."""


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
        prepare_workers=_PREPARE_WORKERS,
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
    rng = Random(f"{seed} {load.name}")
    return [Ask(at_s, _request(f"r{number}", kind, rng)) for number, (at_s, kind) in enumerate(_arrivals(load, rng))]


def _arrivals(load: Load, rng: Random) -> Iterator[tuple[float, Kind]]:
    """When each request comes, in seconds after the start, and of which kind it is."""
    now_s = 0.0
    if load.counts:
        for kind, count in zip(load.kinds, load.counts, strict=True):
            for _ in range(count):
                now_s += 1 / kind.per_s
                yield now_s, kind
        return
    while True:
        kind = load.kinds[int(now_s // 60) % len(load.kinds)]
        now_s += rng.expovariate(kind.per_s)
        if now_s >= 60 * load.minutes:
            return
        yield now_s, kind


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

    async def main() -> Row:
        switched: list[tuple[float, str]] = []
        async with running(world(_roles(row), seed, switches=row == SWITCHING)) as cluster:
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
    times: list[Times] = []
    for reply in replies:
        wanted = reply.ask.request.sampling.max_tokens or 0
        got = len(reply.answers[0].token_ids)
        if reply.error is not None or reply.first_s is None or got != wanted:
            raise AssertionError(f"{reply.ask.request.request_id}: {got} of {wanted} tokens, {reply.error!r}")
        due_s = begun_s + reply.ask.at_s
        gap_s = (reply.ended_s - reply.first_s) / max(1, wanted - 1)
        times.append((reply.ended_s - due_s, reply.first_s - due_s, gap_s))
    return summary(load, row, times, switched)


def summary(load: Load, row: str, times: Sequence[Times], switched: Sequence[tuple[float, str]]) -> Row:
    latencies, firsts, gaps = zip(*times, strict=True)
    return Row(
        load.name,
        row,
        len(times),
        round(fmean(latencies), 2),
        round(percentile(latencies, 95), 2),
        round(fmean(firsts), 2),
        round(fmean(gaps), 4),
        tuple(switched),
    )


# --- real processes ------------------------------------------------------------------------------------------------------


def write_profiles(directory: Path, costs: EngineCosts) -> None:
    """The same costs as those of ``engines``, for engines that sleep."""
    encoder = synthetic_encoder_profile(pass_s=costs.image_s, token_s=0.0, prepare_s=costs.prepare_s, load_s=0.1)
    decoder = synthetic_decoder_profile(
        step_s=costs.step_s, sequence_s=costs.sequence_s, prefill_token_s=0.0, load_s=0.1
    )
    # The token that is computed when an answer is taken over costs as much as one that is decoded.
    sizes = ((1, costs.sequence_s), (_LEAST_PROMPT, costs.prompt_s), (65536, costs.prompt_s))
    prefill = tuple(PrefillRow(new, cached, took_s) for new, took_s in sizes for cached in (0, 65536))
    write_profile(directory / "encoder.json", encoder)
    write_profile(directory / "decoder.json", replace(decoder, prefill=prefill))


def planned(load: Load, seed: int) -> list[Planned]:
    """The requests of ``asks_of`` for real clients, of a load that shifts."""
    image = Size(_SIDE_PX, _SIDE_PX)
    return [
        Planned(at_s, 3, (image,) * kind.images, kind.output_tokens) for at_s, kind in _arrivals(load, Random(seed))
    ]


async def _watch_processes(manager: PoolManagerStub, begun_s: float, switched: list[tuple[float, str]]) -> None:
    """Note which instances open other stages, until cancelled."""
    before: dict[str, Role] = {}
    while True:
        with suppress(TriptychError):
            for pool in (await manager.status()).pools:
                for member in pool.members:
                    if pool.role is None or not member.open:
                        continue
                    name, role = member.registration.instance_id, Role.of(member.open)
                    if role is not before.get(name, pool.role):
                        switched.append((round(asyncio.get_running_loop().time() - begun_s, 1), role.value))
                    before[name] = role
        await asyncio.sleep(_POLL_S)


class Sleeper:
    """Sleeps in a thread as an engine does, and notes by how much it wakes up late: what else runs makes engines slower."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sleep)

    def _sleep(self) -> None:
        while not self._ended.is_set():
            began_s = time.perf_counter()
            time.sleep(_SLEEP_S)
            self.late_s.append(time.perf_counter() - began_s - _SLEEP_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


async def measured_processes(load: Load, row: str, seed: int, logs: Path | None) -> tuple[Row, dict[str, Any]]:
    """The row, and how busy the machine was; the processes' logs go to ``logs``. Raises AssertionError if a request failed."""
    roles = ",".join(f"{role.value}:{sum(held is role for held in _roles(row))}" for role in (Role.E, Role.P, Role.D))
    records: list[Record] = []
    switched: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        model, profiles = write_delay_model(Path(folder) / "model", Attention.DECODER_ONLY), Path(folder) / "profiles"
        write_profiles(profiles, COSTS)
        delayed, known = ("--delay-profile", str(profiles)), ("--profiles", str(profiles))
        options = {
            "encoder": (*delayed, *_ENCODER),
            "mounted_encoder": _ENCODER,
            "text": (*delayed, *_TEXT),
            "router": (*known, "--slo", ",".join(SLO)),
            "pool_manager": known,
            "gateway": ("--request-timeout-s", f"{_PATIENCE_S:g}"),
        }
        async with LocalCluster(
            f"{_MODEL}={model}", roles=roles, switch_roles=row == SWITCHING, options=options, log_dir=logs
        ) as cluster:
            manager = PoolManagerStub(cluster.manager_target)
            endpoint = bench.Endpoint(cluster.url, timeout_s=_PATIENCE_S)
            await asyncio.sleep(_SETTLE_S)
            begun_s, used_s = asyncio.get_running_loop().time(), _cpu_s(cluster)
            with Sleeper() as sleeper:
                async with asyncio.TaskGroup() as group:
                    watching = group.create_task(_watch_processes(manager, begun_s, switched), name="watch-roles")
                    await bench.run(
                        endpoint, planned(load, seed), Style(_MODEL, ignore_eos=True), Random(seed), records.append
                    )
                    watching.cancel()
            took_s = asyncio.get_running_loop().time() - begun_s
            cores = (_cpu_s(cluster) - used_s) / took_s
            await manager.close()
    times: list[Times] = []
    for record in records:
        wanted = record.planned.output_tokens
        if not record.ok or record.ttft_s is None or record.tokens != wanted:
            raise AssertionError(f"{record.tokens} of {wanted} tokens, {record.error!r}")
        times.append((record.end_s, record.ttft_s, record.tpot_s or 0.0))
    busy = {
        "row": row,
        "cores_used": round(cores, 2),
        "load_average": round(os.getloadavg()[1], 1),
        "sent_late_p99_s": round(percentile([record.sent_late_s for record in records], 99), 3),
        "sleep_late_mean_s": round(fmean(sleeper.late_s), 4),
        "sleep_late_p99_s": round(percentile(sleeper.late_s, 99), 4),
    }
    return summary(load, row, times, switched), busy


def _cpu_s(cluster: LocalCluster) -> float:
    """Of all processes of the cluster, and of this one, which has the clients."""
    spent = [psutil.Process(pid).cpu_times() for pid in (*cluster.processes.values(), os.getpid())]
    return fsum(times.user + times.system for times in spent)


def _roles(row: str) -> tuple[Role, ...]:
    return TWO_FIVE if row == FROM_START else FIVE_TWO


def differences(virtual: Sequence[Row], real: Sequence[Row]) -> list[dict[str, Any]]:
    """By how much the processes' means differ from those in virtual time."""
    of = {(row.load, row.row): row for row in virtual}
    found: list[dict[str, Any]] = []
    for row in real:
        other = of[row.load, row.row]
        pairs = {
            "latency": (row.latency_s, other.latency_s),
            "ttft": (row.ttft_s, other.ttft_s),
            "tpot": (row.tpot_s, other.tpot_s),
        }
        found.append({"row": row.row} | {name: round(mine / theirs - 1, 3) for name, (mine, theirs) in pairs.items()})
    return found


def show(rows: Sequence[Row]) -> None:
    fixed = {row.load: row for row in rows if row.row == FIXED}
    print(f"{'load':>20} {'':>15} {'latency':>8} {'P95':>8} {'TTFT':>7} {'TPOT':>8}")
    for row in rows:
        print(
            f"{row.load:>20} {row.row:>15} {row.latency_s:>7.2f}s {row.latency_p95_s:>7.2f}s {row.ttft_s:>6.2f}s {1e3 * row.tpot_s:>6.1f}ms"
            f"   {f'{fixed[row.load].latency_s / row.latency_s:.2f} times better than fixed, ' if row.load in fixed else ''}"
            f"{len(row.switched)} changes of stages"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="one shift with short answers: shows that it works")
    parser.add_argument("--seed", type=int, default=Settings().seed)
    parser.add_argument("--logs", type=Path, help="with --processes: a new directory for their logs")
    parser.add_argument("--loads", help="of those above, separated by semicolons")
    parser.add_argument(
        "--processes", action="store_true", help="the load shift, in virtual time and with real processes"
    )
    arguments = parser.parse_args()
    ending.by_sigterm()
    quick = QUICK_PROCESSES if arguments.processes else QUICK
    settings = replace(quick if arguments.quick else Settings(), seed=arguments.seed)
    if arguments.processes:
        settings = replace(settings, loads=tuple(load for load in settings.loads if load.counts))
    if arguments.loads:
        settings = replace(settings, loads=tuple(load for load in LOADS if load.name in arguments.loads.split(";")))
    described = machine.describe()
    print(f"{described['cpu']}, {described['cores']} cores; {COSTS}; {', '.join(SLO)}; {SwitchLimits()}", flush=True)
    rows: list[Row] = []
    for load in settings.loads:
        for name in settings.rows if load.counts else (FIXED, SWITCHING):
            rows.append(measured(load, name, settings.seed))
            print(rows[-1], flush=True)
    show(rows)
    said: dict[str, Any] = {"costs": asdict(COSTS), "objectives": SLO, "limits": asdict(SwitchLimits())}
    if arguments.processes:
        said |= of_processes(settings, rows, arguments.logs)
    write_figures(
        arguments.json,
        {"machine": described, "settings": asdict(settings), **said, "rows": [asdict(row) for row in rows]},
    )


def of_processes(settings: Settings, virtual: Sequence[Row], logs: Path | None) -> dict[str, Any]:
    """The figures of real processes, beside those in virtual time."""
    real: list[Row] = []
    busy: list[dict[str, Any]] = []
    for load in settings.loads:
        for name in settings.rows:
            row, how_busy = uvloop.run(measured_processes(load, name, settings.seed, logs and logs / name))
            real.append(row)
            busy.append(how_busy)
            print(row, how_busy, flush=True)
    print("real processes:")
    show(real)
    compared = differences(virtual, real)
    for comparison in compared:
        print(
            f"{comparison['row']:>20}: latency {comparison['latency']:+.1%}, TTFT {comparison['ttft']:+.1%}, TPOT {comparison['tpot']:+.1%} against virtual time"
        )
    return {"processes": [asdict(row) for row in real], "differences": compared, "busy": busy}


if __name__ == "__main__":
    main()
