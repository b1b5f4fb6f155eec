"""From the end of a prompt at one text instance to the first decode step at another: a part of ``benchmarks.kv_transfer``.

Two processes with the real engine on one thread each, roles P and D, and this one in place of a router: it sends the prompt to the first,
and the answer with the tickets of its keys and values on to the second. One prompt at a time, each of other random tokens.

In ``chunks`` a step takes at most so many tokens of a prompt, and what is computed is sealed while later chunks are computed; ``at the end``
the whole prompt is one step, so that everything is sealed after it. Both alternate. Times are those of the instances themselves, by one clock.
"""

import asyncio
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks import random_qwen
from benchmarks.timed_text import STEP, Happened, Options, Timed, timed
from triptych.demo import MODEL_DIR
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.generation import KvTransferred, TextEvent, TextRequest, TokenChunk
from triptych.domain.sampling import SamplingParams
from triptych.runtime.clock import monotonic

CHUNKS, AT_THE_END = "chunks", "at the end"
WHOLE_PROMPT = 4096
_WORDS = range(8, 500)
"""Ids of tokens that are words in all models here."""
_LEASE_S = 60.0


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    prompts: tuple[int, ...]
    """Tokens of each prompt."""
    shape: random_qwen.Shape | None = None
    """None for the demo model."""


MODELS = (
    Model("demo", (512, 960)),
    Model("50 million", (512, 2048), random_qwen.FIFTY_MILLION),
    Model(
        "50 million, 8 key heads",
        (512, 2048),
        replace(random_qwen.FIFTY_MILLION, queries_per_key=1),
    ),
)


@dataclass(frozen=True, slots=True)
class StepSettings:
    models: tuple[Model, ...] = MODELS
    rounds: int = 7
    chunk_tokens: int = 256
    answer_tokens: int = 8
    transport: str = "shm"


QUICK_STEPS = StepSettings(models=(Model("demo", (200,)),), rounds=1, chunk_tokens=64, answer_tokens=4)


@dataclass(frozen=True, slots=True)
class Times:
    """Of one prompt. Times are seconds after its last step ended at the first instance."""

    chunks: int
    """Steps of the prompt."""
    segments: int
    nbytes: int
    early_nbytes: int
    """Sealed before the last step ended."""
    prefill_s: float
    """From the begin of the first of its steps to the end of the last."""
    sealed_s: float
    kv_transferred_s: float
    """The caller has the tickets."""
    arrived_s: float
    """All is in the KV cache of the second instance."""
    decode_s: float
    """The second instance's first decode step begins ..."""
    token_s: float
    """... and the caller has its token."""
    step_s: float
    """A later decode step: the median."""


async def measure_steps(settings: StepSettings, note: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows, of which those of each model are noted when they are there."""
    note(_HEAD)
    rows: list[dict[str, Any]] = []
    for model in settings.models:
        with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
            if model.shape is not None:
                random_qwen.make(Path(folder), model.shape)
            taken = await _of_model(MODEL_DIR if model.shape is None else Path(folder), model, settings)
        of_model = [_row(model.name, tokens, how, times) for (tokens, how), times in taken.items()]
        for row in of_model:
            note(_line(row))
        rows += of_model
    return rows


async def _of_model(path: Path, model: Model, settings: StepSettings) -> dict[tuple[int, str], list[Times]]:
    budgets = {CHUNKS: settings.chunk_tokens, AT_THE_END: WHOLE_PROMPT}
    requests = _requests(settings)
    taken: dict[tuple[int, str], list[Times]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        wanted = [Options(path, "P", budget, settings.transport) for budget in budgets.values()]
        wanted.append(Options(path, "D", WHOLE_PROMPT, settings.transport))
        *started, reader = await asyncio.gather(*(stack.enter_async_context(timed(options)) for options in wanted))
        senders = dict(zip(budgets, started, strict=True))
        for number in range(settings.rounds + 1):
            for tokens in model.prompts:
                for how, sender in senders.items():
                    times = await _kv_transferred(sender, reader, requests(tokens))
                    if number > 0:  # the first round connects, and warms up
                        taken[tokens, how].append(times)
    return taken


def _requests(settings: StepSettings) -> Callable[[int], TextRequest]:
    rng, names = random.Random(16), count()
    sampling = SamplingParams(temperature=0, max_tokens=settings.answer_tokens, ignore_eos=True, seed=1)

    def request(tokens: int) -> TextRequest:
        prompt = tuple(rng.choice(_WORDS) for _ in range(tokens))
        return TextRequest(f"r{next(names)}", "random", prompt, (), sampling, 60.0, kv_lease_s=_LEASE_S)

    return request


async def _kv_transferred(sender: Timed, reader: Timed, request: TextRequest) -> Times:
    await sender.happened()
    await reader.happened()
    first = [event async for event in _events(sender, replace(request, transfers_kv=True))]
    kv_transferred_s, kv_transferred = first[-1]
    assert isinstance(kv_transferred, KvTransferred), kv_transferred
    token_ids = tuple(token for _, event in first if isinstance(event, TokenChunk) for token in event.token_ids)
    segments = tuple(
        replace(segment.placement, ticket=segment.placement.ticket.at(sender.address))
        for segment in kv_transferred.segments
    )
    goes_on = replace(request, continued=(ContinuedChoice(0, token_ids),), kv_segments=segments)
    second = [event async for event in _events(reader, goes_on)]
    await sender.stub.release([segment.router_lease for segment in kv_transferred.segments])
    token_s = next(at_s for at_s, event in second if isinstance(event, TokenChunk))
    return times_of(await sender.happened(), await reader.happened(), kv_transferred_s, token_s)


async def _events(instance: Timed, request: TextRequest) -> AsyncGenerator[tuple[float, TextEvent]]:
    """Events, each with when it came."""
    async with aclosing(instance.stub.generate(request)) as stream:
        async for events in stream:
            now_s = monotonic()
            for event in events:
                yield now_s, event


def times_of(sent: Sequence[Happened], taken: Sequence[Happened], kv_transferred_s: float, token_s: float) -> Times:
    """From what happened at both instances, and from when the caller had the tickets, and the token after the first."""
    prompt = [event for event in sent if event.what == STEP]
    sealed = [event for event in sent if event.what == "sealed"]
    pulled = [event for event in taken if event.what == "pulled"]
    steps = [event for event in taken if event.what == STEP and event.count]
    if sum(event.count for event in sealed) != sum(event.count for event in pulled) or not pulled:
        raise RuntimeError(f"not all keys and values were transferred: {sent}, {taken}")
    began_s, end_s = prompt[0].began_s, prompt[-1].ended_s
    return Times(
        chunks=len(prompt),
        segments=len(sealed),
        nbytes=sum(event.count for event in sealed),
        early_nbytes=sum(event.count for event in sealed if event.ended_s < end_s),
        prefill_s=end_s - began_s,
        sealed_s=sealed[-1].ended_s - end_s,
        kv_transferred_s=kv_transferred_s - end_s,
        arrived_s=pulled[-1].ended_s - end_s,
        decode_s=steps[0].began_s - end_s,
        token_s=token_s - end_s,
        step_s=statistics.median(step.ended_s - step.began_s for step in steps[1:]),
    )


def _row(model: str, tokens: int, how: str, taken: Sequence[Times]) -> dict[str, Any]:
    """Medians over the rounds."""
    first = taken[0]

    def ms(name: str) -> float:
        values: list[float] = [getattr(times, f"{name}_s") for times in taken]
        return round(1e3 * statistics.median(values), 1)

    return {
        "model": model,
        "prompt_tokens": tokens,
        "how": how,
        "chunks": first.chunks,
        "segments": first.segments,
        "mib": round(first.nbytes / 2**20, 1),
        "sealed_early": round(statistics.median(times.early_nbytes / times.nbytes for times in taken), 3),
        **{f"{name}_ms": ms(name) for name in _TIMES},
    }


_TIMES = ("prefill", "sealed", "kv_transferred", "arrived", "decode", "token", "step")


_HEAD = (
    "ms after the end of the last chunk at P: all is sealed, the caller has the tickets, all is in D's cache, D's first decode step begins, "
    f"its token is here\n{'model':>24} {'prompt':>6} {'sealed':>10} {'chunks':>6} {'segments':>8} {'MiB':>6} {'before':>6} {'prefill':>8} "
    f"{'sealed':>7} {'tickets':>7} {'in D':>7} {'decode':>7} {'token':>7}  a step"
)


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:>24} {row['prompt_tokens']:>6} {row['how']:>10} {row['chunks']:>6} {row['segments']:>8} {row['mib']:>6} "
        f"{row['sealed_early']:>6.0%} {row['prefill_ms']:>8} {row['sealed_ms']:>7} {row['kv_transferred_ms']:>7} {row['arrived_ms']:>7} "
        f"{row['decode_ms']:>7} {row['token_ms']:>7}  {row['step_ms']}"
    )
