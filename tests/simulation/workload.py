"""Requests from a seed, the clients that send them, and their expected answers."""

import asyncio
import math
from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from random import Random

from triptych import ports
from triptych.domain.chat import ChatRequest, MediaPart, Message, Part, TextPart
from triptych.domain.generation import ChatEvent, ChatFinished, ChoiceFinished, FinishReason, TokenChunk
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.errors import TriptychError
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.testing.fake_kv import Spliced, answer_tokens
from triptych.testing.fakes import FAKE_MODEL, fake_embedding
from triptych.testing.media import png
from triptych.testing.model import WORDS, fake_prompt_builder, fake_tokenizer
from triptych.workload.requests import Plan, Planned

_MAX_IMAGES, _MAX_SIDE_PX, _SHRINK = 8, 112, 1 / 8
"""Of a trace's request: what is replayed, and the factor of its images' sides."""

PROMPTS = fake_prompt_builder()
TOKENIZER = fake_tokenizer()


@dataclass(frozen=True)
class Ask:
    """A request, its send time, and the time after which its client cancels (None: never)."""

    at_s: float
    request: ChatRequest
    leave_after_s: float | None = None

    def right_answers(self) -> list[tuple[int, ...]]:
        """The answers of the whole model, for each choice."""
        images = [part.data for part in self.request.media]
        prompt = PROMPTS.build(self.request.messages, [inspect_media(image, MediaLimits()) for image in images])
        items = [
            Spliced(run.start, run.tokens, fake_embedding(image, run.tokens, FAKE_MODEL.hidden_size))
            for run, image in zip(prompt.runs, images, strict=True)
        ]
        sampling = self.request.sampling
        length = sampling.max_tokens if sampling.ignore_eos else None
        return [
            answer_tokens(prompt.token_ids, items, vocabulary=WORDS, choice=choice, length=length)[
                : sampling.max_tokens
            ]
            for choice in range(sampling.n)
        ]


@dataclass
class Answer:
    """One choice of a client's result."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    reason: FinishReason | None = None


@dataclass
class Reply:
    """A client's result."""

    ask: Ask
    answers: dict[int, Answer] = field(default_factory=lambda: defaultdict(Answer))
    """By choice."""
    finished: ChatFinished | None = None
    error: TriptychError | None = None
    left: bool = False
    first_s: float | None = None
    """When its first token came."""
    ended_s: float = 0.0

    def check_right(self) -> None:
        """Raises AssertionError unless the answer is complete and right."""
        name = self.ask.request.request_id
        assert self.error is None, f"{name}: {self.error!r}"
        assert self.finished is not None, f"{name} has no end"
        right_answers = self.ask.right_answers()
        assert sorted(self.answers) == list(range(len(right_answers))), f"{name}: choices {sorted(self.answers)}"
        for choice, right in enumerate(right_answers):
            got = self.answers[choice]
            assert got.token_ids == right, f"{name}/{choice}: {got.token_ids} instead of {right}"
            assert got.text == TOKENIZER.decode(right), f"{name}/{choice}: the text is {got.text!r}"
            cut = self.ask.request.sampling.max_tokens == len(right)
            assert cut or got.reason is FinishReason.STOP, f"{name}/{choice} ended by {got.reason}"
        tokens = sum(map(len, right_answers))
        assert self.finished.usage.completion_tokens == tokens, f"{name}: usage {self.finished.usage}"


def make_asks(
    seed: int,
    count: int,
    *,
    rate_per_s: float | None = 100.0,
    images: tuple[int, int] = (0, 8),
    distinct_images: int = 60,
    timeout_s: float = 60.0,
) -> list[Ask]:
    """``count`` requests with ``images`` (minimum, maximum) images each, out of ``distinct_images``.

    They arrive as a Poisson process of ``rate_per_s``, or all at once if that is None.
    """
    rng = Random(seed)
    stock = [png(rng.randint(1, 56), rng.randint(1, 56), seed=number) for number in range(distinct_images)]
    asks: list[Ask] = []
    now_s = 0.0
    for number in range(count):
        parts: list[Part] = [MediaPart(Modality.IMAGE, rng.choice(stock)) for _ in range(rng.randint(*images))]
        for _ in range(rng.randint(1, 3)):
            words = " ".join(f"w{rng.choice(WORDS)}" for _ in range(rng.randint(1, 12)))
            parts.insert(rng.randint(0, len(parts)), TextPart(words))
        sampling = SamplingParams(
            temperature=0,
            max_tokens=rng.choice((3, 40)),
            n=rng.choice((1, 1, 1, 3)),
            logprobs=rng.choice((None, 2)),
        )
        message = Message("user", tuple(parts))
        request = ChatRequest(f"r{number}", FAKE_MODEL.model_id, (message,), sampling, timeout_s)
        if rate_per_s is not None:
            now_s += rng.expovariate(rate_per_s)
        asks.append(Ask(now_s, request))
    return asks


BURST = 5.0
"""Arrivals during a burst, in multiples of those at other times."""


def make_bursts(seed: int, count: int, duration_s: float, *, timeout_s: float = 60.0) -> list[Ask]:
    """``count`` requests over ``duration_s``, with a burst of images of 5 to 12 s in every minute."""
    rng = Random(f"{seed}/bursts")
    asks = make_asks(seed, count, images=(0, 1), distinct_images=300, timeout_s=timeout_s)
    heavy = make_asks(seed + 1, count, images=(1, 4), distinct_images=300, timeout_s=timeout_s)
    seconds = range(math.ceil(duration_s))
    in_burst = set[int]()
    for minute in range(0, len(seconds), 60):
        begins = minute + rng.randint(5, 45)
        in_burst.update(range(begins, begins + rng.randint(5, 12)))
    times = rng.choices(seconds, [BURST if second in in_burst else 1.0 for second in seconds], k=count)
    arrivals = sorted(min(second + rng.random(), duration_s) for second in times)
    return [
        replace(heavy[number] if int(at_s) in in_burst else asks[number], at_s=at_s)
        for number, at_s in enumerate(arrivals)
    ]


def make_replay(seed: int, plan: Plan, *, timeout_s: float = 60.0) -> list[Ask]:
    """The requests of a trace at their times, with as many images, which are smaller by a constant factor."""
    rng = Random(f"{seed}/replay")
    asks = make_asks(seed, len(plan.requests), images=(0, 0), timeout_s=timeout_s)
    return [
        replace(
            ask,
            at_s=planned.arrival_s,
            request=replace(
                ask.request,
                messages=(Message("user", (*ask.request.messages[0].parts, *_images(planned, rng))),),
            ),
        )
        for ask, planned in zip(asks, plan.requests, strict=True)
    ]


def _images(planned: Planned, rng: Random) -> list[Part]:
    sides = [max(1, min(_MAX_SIDE_PX, round(size.width * _SHRINK))) for size in planned.images[:_MAX_IMAGES]]
    return [MediaPart(Modality.IMAGE, png(side, side, seed=rng.randrange(300))) for side in sides]


async def play(router: ports.Router, asks: list[Ask], replies: list[Reply] | None = None) -> list[Reply]:
    """Sends every request at its time; returns when every client has its answer, its error, or has cancelled.

    ``replies``, one per request, fill as they arrive.
    """
    replies = [Reply(ask) for ask in asks] if replies is None else replies
    started_s = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        for reply in replies:
            group.create_task(_client(router, reply, started_s), name=f"client-{reply.ask.request.request_id}")
    return replies


async def _client(router: ports.Router, reply: Reply, started_s: float) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(started_s + reply.ask.at_s - loop.time())
    try:
        async with asyncio.timeout(reply.ask.leave_after_s):
            await _read(router, reply)
    except TimeoutError:
        reply.left = True
    except TriptychError as error:
        reply.error = error
    reply.ended_s = loop.time()


async def _read(router: ports.Router, reply: Reply) -> None:
    async with aclosing(router.chat(reply.ask.request)) as stream:
        async for events in stream:
            assert events, "an empty batch of events"
            if reply.first_s is None:
                reply.first_s = asyncio.get_running_loop().time()
            for event in events:
                _read_one(reply, event)


def _read_one(reply: Reply, event: ChatEvent) -> None:
    assert reply.finished is None, "an event after the last"
    match event:
        case TokenChunk(token_ids, text, choice):
            answer = reply.answers[choice]
            assert answer.reason is None, "a token after the choice's last"
            answer.token_ids += token_ids
            answer.text += text
            told = tuple(entry.chosen.token_id for entry in event.logprobs)
            assert told == (() if reply.ask.request.sampling.logprobs is None else token_ids)
        case ChoiceFinished(reason, choice):
            assert reply.answers[choice].reason is None, "a choice that ends twice"
            reply.answers[choice].reason = reason
        case ChatFinished():
            reply.finished = event
