"""Measure the costs of one part of a model, in a process of its own: ``python -m triptych.engine.profiling``.

``triptych profile`` starts it and reads one JSON object per line. ``ready`` comes first, then ``row`` and ``skipped``
for each row of the tables, with a ``control`` before, among and after them. ``found`` is for the search of the largest
load and batch. Rows that an earlier run has measured (``--known``) are not measured again. Other engines have a module of their own
that calls ``main``.
"""

import argparse
import json
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, TextIO, TypeVar

from triptych.domain.embedding import embedding_tokens
from triptych.domain.engine import EngineRequest
from triptych.domain.profile import LoadRow, Profile, ProfileIdentity, parse_profile
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import ModelPart, Stage
from triptych.engine.checkpoint import DTYPES, Checkpoint, open_checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.engine.encoder import AdapterEncoderEngine, TransformersEncoderEngine
from triptych.engine.measuring import EncoderProbe, Repeats, TextProbe
from triptych.engine.part_identity import part_identity
from triptych.engine.probe_media import image, sound
from triptych.errors import InvalidMedia
from triptych.families.model_files import BadModel
from triptych.policy.sizing import MARGIN
from triptych.ports import TextEngine
from triptych.runtime.process import CannotStart

T = TypeVar("T")
_STRETCHES = 4
"""Stretches of the rows; the control is measured between them."""
_STEPS = 8
"""Decode steps per sample."""
_LEAST_ARRIVALS = 20
MAX_EMBEDDING_BYTES = 1 << 30
MODEL_ID = "profiled"


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits of a measurement. An axis ends early where one row takes longer than ``row_s`` or does not fit."""

    repeats: Repeats
    sides_px: tuple[int, ...]
    items: tuple[int, ...]
    prompts: tuple[int, ...]
    cached: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    row_s: float
    load_batches: tuple[int, ...]
    """Batch limits under load."""
    arrivals: int
    """Items or requests per load level, at most."""
    level_s: float
    """Longest time of a load level, seconds. It has fewer requests, but at least 20, if they would take longer."""
    output_tokens: int
    """Output tokens of the requests of load levels."""
    levels: tuple[float, ...]
    """Offered loads, relative to the highest throughput."""
    searches: int
    """Further levels that narrow down the highest load within the objectives."""

    def step_tokens(self, context: int) -> int:
        """Tokens of a step that computes each of the prompts, up to the model's ``context``, in one pass."""
        return max(*self.batches, min(context, max(self.prompts)))


_POWERS = tuple(2**n for n in range(18))
EFFORTS = {
    "quick": Effort(
        repeats=Repeats(least=3, most=8, width=0.1, most_s=0.3),
        sides_px=(112, 336, 672),
        items=(1, 2, 4, 8),
        prompts=(16, 32, 64, 128, 256, 512, 1000),
        cached=(0, 256, 512),
        batches=(1, 2, 4, 8, 16, 32),
        contexts=(16, 128, 256, 512, 1000),
        row_s=0.5,
        load_batches=(1, 8),
        arrivals=100,
        level_s=1.0,
        output_tokens=8,
        levels=(0.4, 0.8),
        searches=1,
    ),
    "full": Effort(
        repeats=Repeats(least=5, most=50, width=0.05, most_s=10.0),
        sides_px=(112, 224, 336, 448, 672, 896, 1344, 2016),
        items=_POWERS[:6],
        prompts=_POWERS[3:],
        cached=(0, 512, 2048, 8192, 32768),
        batches=_POWERS[:9],
        contexts=(16, *_POWERS[6:]),
        row_s=20.0,
        load_batches=_POWERS[:9],
        arrivals=1000,
        level_s=30.0,
        output_tokens=64,
        levels=(0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95),
        searches=4,
    ),
}


@dataclass(frozen=True, slots=True)
class Options:
    """Command line of the process."""

    model: Path
    part: ModelPart
    compute: ComputeOptions
    kv_cache_bytes: int
    effort: Effort
    slo_factor: float
    """Objectives are this times the latencies without load."""
    vllm_args: str = ""
    """Engine vllm: its arguments."""


@dataclass(frozen=True, slots=True)
class Task:
    """Row to measure. Tasks of one ``line`` of a table are in increasing order."""

    table: str
    place: tuple[int, int]
    measure: Callable[[], float | None]
    """Returns seconds; None if it does not fit the engine."""
    line: int = 0


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of one load level, by stage, and its throughput."""

    by_stage: Mapping[Stage, Sequence[float]]
    per_s: float


Emit = Callable[[Mapping[str, object]], None]


def _nothing() -> None:
    """It has started nothing."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a part was loaded."""

    identity: ProfileIdentity
    load_s: float
    weights_nbytes: int
    close: Callable[[], None] = _nothing
    """Ends what the engine has started."""


class Profiled(ABC):
    """A loaded engine and what can be measured of it."""

    loaded: Loaded
    tokens: int
    """Tokens of the items or prompts of load levels."""
    output_tokens: int
    facts: Mapping[str, object]
    """Fields of ``domain.profile.Measured``."""

    @abstractmethod
    def tasks(self) -> list[Task]: ...

    @abstractmethod
    def control_s(self) -> float:
        """Always the same work."""

    @abstractmethod
    def serve(self, arrivals_s: Sequence[float], max_batch: int) -> Latencies:
        """Serve items or requests that arrive at these times. Idle time is skipped, not waited for."""

    @abstractmethod
    def alone_s(self) -> Mapping[Stage, float]:
        """Latencies without load."""


Open = Callable[[Checkpoint, Options], Profiled]
"""Loads a part of a model. Raises BadModel, CannotStart."""


class ProfiledEncoder(Profiled):
    def __init__(self, engine: AdapterEncoderEngine, loaded: Loaded, effort: Effort) -> None:
        self._effort, self.loaded = effort, loaded
        self._probe = EncoderProbe(engine)
        self._item = self._probe.item()
        self.tokens, self.output_tokens = embedding_tokens(self._item.outputs), 0
        output_nbytes = sum(spec.nbytes for spec in self._item.outputs) // max(1, self.tokens)
        self.facts = {
            "load_s": loaded.load_s,
            "weights_nbytes": loaded.weights_nbytes,
            "output_token_nbytes": output_nbytes,
        }

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: Options) -> "ProfiledEncoder":
        """Triptych's own engine."""
        engine, load_s = timed(
            lambda: TransformersEncoderEngine(checkpoint, model_id=MODEL_ID, compute=options.compute)
        )
        identity = part_identity(checkpoint, ModelPart.ENCODER, options.compute)
        return cls(engine, Loaded(identity, load_s, engine.weights_nbytes), options.effort)

    def tasks(self) -> list[Task]:
        tasks, seen = list[Task](), set[int]()
        for pixels, media in self._media():
            tasks.append(Task("prepare", (len(media), pixels), self._prepare(media), line=len(tasks)))
            item = self._probe.prepared(media)
            tokens = embedding_tokens(item.outputs)
            if tokens in seen:
                continue
            seen.add(tokens)
            for items in self._effort.items:

                def encode_s(item: Any = item, items: int = items) -> float:
                    return self._effort.repeats.median_s(lambda: [self._probe.encode_s(item, items)])

                tasks.append(Task("encode", (tokens, items), encode_s, line=tokens))
        return tasks

    def _media(self) -> Iterable[tuple[int, bytes]]:
        """Images with few and with many bytes per pixel, or clips if the model takes no images; with their size."""
        try:
            self._probe.prepared(image(self._effort.sides_px[0]))
        except InvalidMedia:
            for seconds in (1, 5, 10, 30):
                yield 16_000 * seconds, sound(seconds)
            return
        for side_px in self._effort.sides_px:
            for noise in (False, True):
                yield side_px * side_px, image(side_px, noise=noise)

    def _prepare(self, media: bytes) -> Callable[[], float]:
        return lambda: self._effort.repeats.median_s(lambda: [self._probe.prepare_s(media)])

    def control_s(self) -> float:
        return self._effort.repeats.median_s(lambda: [self._probe.encode_s(self._item, 1)])

    def alone_s(self) -> Mapping[Stage, float]:
        return {Stage.ENCODE: self.control_s()}

    def serve(self, arrivals_s: Sequence[float], max_batch: int) -> Latencies:
        now_s, served, latencies = 0.0, 0, list[float]()
        while served < len(arrivals_s):
            now_s = max(now_s, arrivals_s[served])
            batch = [arrival_s for arrival_s in arrivals_s[served : served + max_batch] if arrival_s <= now_s]
            now_s += self._probe.encode_s(self._item, len(batch))
            latencies += [now_s - arrived_s for arrived_s in batch]
            served += len(batch)
        return Latencies({Stage.ENCODE: latencies}, served / now_s)


class ProfiledDecoder(Profiled):
    def __init__(
        self,
        engine: TextEngine,
        loaded: Loaded,
        effort: Effort,
        *,
        context: int,
        kv_token_nbytes: int,
        step_tokens: int | None = None,
    ) -> None:
        """``context``: of the model, tokens. ``step_tokens``: as in ``TextProbe``; no longer prompt is measured."""
        self._effort, self.loaded = effort, loaded
        self._engine = engine
        self._probe = TextProbe(engine, step_tokens=step_tokens)
        self._prompts = [tokens for tokens in effort.prompts if step_tokens is None or tokens <= step_tokens]
        self._token = next(token for token in range(context) if token not in engine.placeholder_ids)
        self.tokens, self.output_tokens = min(256, context // 4), min(effort.output_tokens, context // 4)
        self.facts = {
            "load_s": loaded.load_s,
            "weights_nbytes": loaded.weights_nbytes,
            "kv_token_nbytes": kv_token_nbytes,
        }
        self._serial = 0

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: Options) -> "ProfiledDecoder":
        """Triptych's own engine."""
        context, effort = checkpoint.family.context_length, options.effort
        engine_options = EngineOptions(
            kv_cache_bytes=options.kv_cache_bytes,
            max_sequences=max(effort.batches),
            token_budget=effort.step_tokens(context),
        )
        engine, load_s = timed(
            lambda: TransformersTextEngine(
                checkpoint,
                engine_options,
                model_id=MODEL_ID,
                max_embedding_bytes=MAX_EMBEDDING_BYTES,
                compute=options.compute,
            )
        )
        identity = part_identity(checkpoint, ModelPart.DECODER, options.compute)
        loaded = Loaded(identity, load_s, engine.weights_nbytes)
        kv_token_nbytes = options.kv_cache_bytes // engine.kv_tokens
        return cls(engine, loaded, effort, context=context, kv_token_nbytes=kv_token_nbytes)

    def tasks(self) -> list[Task]:
        tasks = []
        repeats = self._effort.repeats
        for cached in self._effort.cached:
            for new in self._prompts:

                def prefill_s(new: int = new, cached: int = cached) -> float | None:
                    if self._probe.prefill_s(new, cached) is None:
                        return None
                    return repeats.median_s(lambda: [self._probe.prefill_s(new, cached) or inf])

                tasks.append(Task("prefill", (new, cached), prefill_s, line=cached))
        for batch in self._effort.batches:
            for context in self._effort.contexts:

                def decode_s(batch: int = batch, context: int = context) -> float | None:
                    if self._probe.decode_s(batch, context, _STEPS) is None:
                        return None
                    return repeats.median_s(lambda: self._probe.decode_s(batch, context, _STEPS) or [])

                tasks.append(Task("decode", (batch, context), decode_s, line=batch))
        return tasks

    def control_s(self) -> float:
        return self._effort.repeats.median_s(lambda: [self._probe.prefill_s(self.tokens) or inf])

    def alone_s(self) -> Mapping[Stage, float]:
        repeats = self._effort.repeats
        decode_s = repeats.median_s(lambda: self._probe.decode_s(1, self.tokens, _STEPS) or [])
        return {Stage.PREFILL: self.control_s(), Stage.DECODE: decode_s}

    def serve(self, arrivals_s: Sequence[float], max_batch: int) -> Latencies:
        now_s, arrived = 0.0, 0
        latest_s: dict[str, float] = {}
        """Per running request, when it arrived or got its last token."""
        started: set[str] = set()
        first, gaps = list[float](), list[float]()
        while arrived < len(arrivals_s) or latest_s:
            if not latest_s:
                now_s = max(now_s, arrivals_s[arrived])
            while arrived < len(arrivals_s) and arrivals_s[arrived] <= now_s and len(latest_s) < max_batch:
                latest_s[self._add()] = arrivals_s[arrived]
                arrived += 1
            began_s = time.perf_counter()
            outputs = self._engine.step()
            now_s += time.perf_counter() - began_s
            for output in outputs:
                if output.error is not None:
                    raise output.error
                (gaps if output.request_id in started else first).append(now_s - latest_s[output.request_id])
                started.add(output.request_id)
                latest_s[output.request_id] = now_s
                if output.finish_reason is not None:
                    del latest_s[output.request_id]
        return Latencies({Stage.PREFILL: first, Stage.DECODE: gaps}, len(arrivals_s) / now_s)

    def _add(self) -> str:
        self._serial += 1
        name = f"load-{self._serial}"
        sampling = SamplingParams(temperature=0, max_tokens=self.output_tokens, ignore_eos=True, seed=0)
        salt = b"load" + self._serial.to_bytes(8, "big")
        self._engine.add(EngineRequest(name, (self._token,) * self.tokens, (), sampling, tenant_salt=salt))
        return name


def timed(load: Callable[[], T]) -> tuple[T, float]:
    """What was loaded, and the seconds that it took."""
    began_s = time.perf_counter()
    return load(), time.perf_counter() - began_s


def measure_tables(profiled: Profiled, known: Profile | None, row_s: float, emit: Emit) -> None:
    """Measure every row that is not known, and the control a few times. After a row that took too long or did not fit,
    its line ends.
    """
    done = {} if known is None else {(table, row[:2]): row[2] for table, row in _rows(known)}
    tasks = profiled.tasks()
    emit({"kind": "planned", "rows": len(tasks)})
    ended: set[tuple[str, int]] = set()
    stretch = ceil(len(tasks) / _STRETCHES)
    for number, task in enumerate(tasks):
        if number and number % stretch == 0:
            emit({"kind": "control", "seconds": profiled.control_s()})
        where = {"table": task.table, "place": task.place}
        if (task.table, task.line) in ended:
            emit({"kind": "skipped", **where})
            continue
        seconds = done.get((task.table, task.place))
        if seconds is None:
            seconds = task.measure()
            emit({"kind": "skipped", **where} if seconds is None else {"kind": "row", **where, "seconds": seconds})
        else:
            emit({"kind": "skipped", **where})
        if seconds is None or seconds > row_s:
            ended.add((task.table, task.line))


def _rows(profile: Profile) -> Iterable[tuple[str, Any]]:
    for table in ("encode", "prepare", "prefill", "decode"):
        for row in getattr(profile, table):
            yield table, tuple(row)


def search_load(profiled: Profiled, known: Profile | None, effort: Effort, slo_factor: float, emit: Emit) -> None:
    """Load levels for each batch limit, while a doubling raises the load within the objectives by more than 5 %.

    An objective is ``slo_factor`` times the latency without load.
    """
    slos_s = {stage: slo_factor * seconds for stage, seconds in profiled.alone_s().items()}
    best = (0, 0.0)
    for max_batch in effort.load_batches:
        levels = _known_levels(known, slos_s, max_batch)
        if not levels:
            levels = _levels(profiled, effort, slos_s, max_batch)
            for level in levels:
                for row in level:
                    emit({"kind": "load", "row": [row.stage.value, *row[1:]]})
        highest = max((level[0].tokens_per_s for level in levels if _within(level, slos_s)), default=0.0)
        if best[0] and highest <= (1 + MARGIN) * best[1]:
            break
        best = (max_batch, highest)
    objectives = {stage.value: seconds for stage, seconds in slos_s.items()}
    emit({"kind": "found", "max_batch": best[0], "tokens_per_s": best[1], "objectives": objectives})


def _levels(profiled: Profiled, effort: Effort, slos_s: Mapping[Stage, float], max_batch: int) -> list[list[LoadRow]]:
    """Rows per stage, for fixed shares of the highest throughput and then closer to where an objective breaks."""
    peak_per_s = profiled.serve([0.0] * _LEAST_ARRIVALS, max_batch).per_s
    arrivals = max(_LEAST_ARRIVALS, min(effort.arrivals, int(effort.level_s * peak_per_s)))
    levels: dict[float, list[LoadRow]] = {}

    def at(share: float) -> bool:
        rng = random.Random(f"{max_batch} {share}")  # noqa: S311  # arrivals, not secrets
        gaps = [rng.expovariate(share * peak_per_s) for _ in range(arrivals)]
        served = profiled.serve(list(accumulate(gaps)), max_batch)
        levels[share] = [
            _load_row(profiled, stage, max_batch, share * peak_per_s, latencies)
            for stage, latencies in served.by_stage.items()
            if latencies
        ]
        return _within(levels[share], slos_s)

    good, bad = 0.0, inf
    for share in effort.levels:
        if at(share):
            good = share
        else:
            bad = share
            break
    for _ in range(effort.searches if bad < inf else 0):
        middle = (good + bad) / 2
        good, bad = (middle, bad) if at(middle) else (good, middle)
    return [levels[share] for share in sorted(levels)]


def _load_row(profiled: Profiled, stage: Stage, max_batch: int, per_s: float, latencies: Sequence[float]) -> LoadRow:
    cuts = quantiles(latencies, n=100, method="inclusive") if len(latencies) > 1 else [latencies[0]] * 99
    return LoadRow(
        stage,
        max_batch,
        profiled.tokens,
        profiled.output_tokens,
        per_s * profiled.tokens,
        cuts[49],
        cuts[89],
        cuts[98],
        fmean(latencies),
        fmean(latency * latency for latency in latencies),
    )


def _known_levels(known: Profile | None, slos_s: Mapping[Stage, float], max_batch: int) -> list[list[LoadRow]]:
    rows = [] if known is None else [row for row in known.load if row.max_batch == max_batch and row.stage in slos_s]
    loads = sorted({row.tokens_per_s for row in rows})
    return [[row for row in rows if row.tokens_per_s == load] for load in loads]


def _within(level: Sequence[LoadRow], slos_s: Mapping[Stage, float]) -> bool:
    return all(row.p99_s <= slos_s[row.stage] for row in level)


OWN: Mapping[ModelPart, Open] = {ModelPart.ENCODER: ProfiledEncoder.load, ModelPart.DECODER: ProfiledDecoder.load}
"""Triptych's own engines."""


def run(options: Options, known: Profile | None, emit: Emit, engines: Mapping[ModelPart, Open]) -> None:
    """Load the part, then measure. Raises BadModel, CannotStart."""
    profiled = engines[options.part](open_checkpoint(options.model), options)
    try:
        _measure(profiled, options, known, emit)
    finally:
        profiled.loaded.close()


def _measure(profiled: Profiled, options: Options, known: Profile | None, emit: Emit) -> None:
    part = profiled.loaded.identity
    identity = {
        "part": part.part.value,
        "digest": part.digest,
        "stages": sorted(stage.value for stage in part.stages),
        "hardware": part.hardware,
        "dtype": part.dtype.value,
        "tensor_parallel": part.tensor_parallel,
        "software": part.software,
        "options": dict(part.options),
    }
    emit({"kind": "ready", "identity": identity, "facts": dict(profiled.facts)})
    emit({"kind": "control", "seconds": profiled.control_s()})
    measure_tables(profiled, known, options.effort.row_s, emit)
    emit({"kind": "control", "seconds": profiled.control_s()})
    search_load(profiled, known, options.effort, options.slo_factor, emit)
    emit({"kind": "control", "seconds": profiled.control_s()})


def main(arguments: Sequence[str], engines: Mapping[ModelPart, Open] = OWN, out: TextIO | None = None) -> int:
    """``out`` gets the reports, by default the standard output."""
    parser = argparse.ArgumentParser(prog="triptych.engine.profiling", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--part", type=ModelPart, choices=list(ModelPart), required=True)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-cache-bytes", type=int, default=256 << 20)
    parser.add_argument("--effort", choices=sorted(EFFORTS), default="full")
    parser.add_argument("--slo-factor", type=float, default=5.0)
    parser.add_argument("--known", type=Path)
    parser.add_argument("--vllm-args", default="")
    given = parser.parse_args(arguments)
    known = None if given.known is None else parse_profile(given.known.read_bytes())
    options = Options(
        given.model,
        given.part,
        ComputeOptions(given.device, given.dtype, torch_threads=given.threads),
        given.kv_cache_bytes,
        EFFORTS[given.effort],
        given.slo_factor,
        given.vllm_args,
    )
    try:
        run(options, known, lambda report: print(json.dumps(report), file=out, flush=True), engines)
    except (BadModel, CannotStart) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
