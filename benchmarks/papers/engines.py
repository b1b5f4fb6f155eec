"""vLLM's engines as they were released, step by step: what the papers compare with, where it is not what Triptych's monolith does.

Each request goes whole to one engine, and its images are encoded in the step of its prompt. V1 computes answers first, and then
parts of prompts; V0 computes whole prompts alone, before answers. Costs are those of the simulations.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf

from benchmarks.papers.simulation import Served
from triptych.policy.costs import Costs
from triptych.workload.report import Record
from triptych.workload.requests import TEMPLATE_TOKENS, Plan, Planned


@dataclass(frozen=True, slots=True)
class Release:
    """How engines of a release schedule, and what a step has beside its pass."""

    budget: int
    """Tokens of a step: ``max_num_batched_tokens``."""
    chunked: bool
    """V1: parts of prompts join the answers. Else, V0: as many whole prompts as fit, and no answers meanwhile."""
    most: int = 256
    """Sequences of an engine: ``max_num_seqs``."""
    ahead_s: float = 0.0
    """Preprocessing of an image in the one process ahead of all engines, for which every request waits."""
    in_step_s: float = 0.0
    """Preprocessing of an image by the engine's process, between its steps."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a model costs at one engine."""

    encoder: Costs
    decoder: Costs
    image_tokens: int
    """Embedding tokens of an image."""
    image_positions: int
    """Of an image in a prompt."""
    kv_tokens: int
    """That an engine has memory for."""

    def encode_s(self, images: int) -> float:
        """All of a step in one pass."""
        return self.encoder.encode_s(self.image_tokens, images).value if images else 0.0


@dataclass(eq=False, slots=True)
class _Request:
    planned: Planned
    prompt_tokens: int
    ready_s: float
    """When an engine can have it."""
    computed: int = 0
    encoded: int = 0
    sent: int = 0
    first_s: float = 0.0
    end_s: float = 0.0
    step: int = 0
    """The engine's first decode step that has it."""
    gaps_s: Sequence[float] = ()

    @property
    def most_tokens(self) -> int:
        return self.prompt_tokens + self.planned.output_tokens

    @property
    def record(self) -> Record:
        arrived_s = self.planned.arrival_s
        return Record(
            self.planned, 0.0, self.first_s - arrived_s, self.end_s - arrived_s, self.prompt_tokens, self.sent
        )


@dataclass(slots=True)
class _Step:
    decodes: list[_Request] = field(default_factory=list)
    prompts: list[tuple[_Request, int]] = field(default_factory=list)
    """With the tokens that are computed."""
    images: int = 0


class _Engine:
    def __init__(self, release: Release, model: Model) -> None:
        self._release = release
        self._model = model
        self._free_tokens = model.kv_tokens
        self._decoded_s: list[float] = []
        """Ends of the steps with decodes."""
        self.waiting: deque[_Request] = deque()
        self.running: list[_Request] = []
        self.ended: list[_Request] = []

    @property
    def load(self) -> int:
        """As vLLM balances its data-parallel engines."""
        return 4 * len(self.waiting) + len(self.running)

    def next_step(self) -> _Step:
        """The requests of the next step, and the images that are encoded for it."""
        release, step = self._release, _Step()
        room = release.budget
        if release.chunked:
            for request in self.running:
                if request.computed == request.prompt_tokens:
                    step.decodes.append(request)
            room -= len(step.decodes)
            for request in self.running:
                room -= self._compute(step, request, room)
        while self.waiting and self._fits(self.waiting[0], room, is_first=not step.prompts):
            request = self.waiting.popleft()
            self.running.append(request)
            self._free_tokens -= request.most_tokens
            room -= self._compute(step, request, room if release.chunked else request.prompt_tokens)
        if not (release.chunked or step.prompts):
            step.decodes = list(self.running)
        return step

    def _fits(self, request: _Request, room: int, *, is_first: bool) -> bool:
        has_room = room > 0 if self._release.chunked else is_first or request.prompt_tokens <= room
        return has_room and len(self.running) < self._release.most and request.most_tokens <= self._free_tokens

    def _compute(self, step: _Step, request: _Request, room: int) -> int:
        """Let a step compute what it can of a prompt, whose images come first; returns the tokens."""
        tokens = min(room, request.prompt_tokens - request.computed)
        if tokens <= 0:
            return 0
        reached = -(-(request.computed + tokens) // self._model.image_positions)
        images = min(len(request.planned.images), reached)
        step.images += images - request.encoded
        request.encoded = images
        step.prompts.append((request, tokens))
        return tokens

    def before_s(self, step: _Step) -> float:
        """What comes before the pass of the language model."""
        return self._model.encode_s(step.images) + step.images * self._release.in_step_s

    def pass_s(self, step: _Step) -> float:
        prompts = [(tokens, request.computed) for request, tokens in step.prompts]
        held = sum(request.computed + request.sent for request in step.decodes)
        return self._model.decoder.step_s(len(step.decodes), held / max(1, len(step.decodes)), prompts).value

    @property
    def steady_steps(self) -> float:
        """Steps until something else than answers is computed, if nothing comes."""
        if self.waiting or any(request.computed < request.prompt_tokens for request in self.running):
            return 0
        return min((request.planned.output_tokens - request.sent for request in self.running), default=inf)

    def steady_s(self, steps: int) -> Sequence[float]:
        """What each of so many such steps takes."""
        held = sum(request.computed + request.sent for request in self.running)
        return self._model.decoder.decode_steps_s(len(self.running), held / len(self.running), steps)

    def advance(self, ends_s: Sequence[float]) -> None:
        """End steps that compute the answers alone."""
        self._decoded_s += ends_s if self.running else ()
        for request in list(self.running):
            request.sent += len(ends_s)
            if request.sent >= request.planned.output_tokens:
                self._leave(request, ends_s[-1])

    def end(self, step: _Step, now_s: float) -> None:
        if step.decodes:
            self._decoded_s.append(now_s)
        for request in step.decodes:
            request.sent += 1
        for request, tokens in step.prompts:
            request.computed += tokens
            if request.computed == request.prompt_tokens:
                request.sent, request.first_s, request.step = 1, now_s, len(self._decoded_s)
        for request in [*step.decodes, *(request for request, _ in step.prompts)]:
            if request.sent and request.sent >= request.planned.output_tokens:
                self._leave(request, now_s)

    def _leave(self, request: _Request, now_s: float) -> None:
        request.end_s = now_s
        request.gaps_s = [
            after - before for before, after in pairwise((request.first_s, *self._decoded_s[request.step :]))
        ]
        self.running.remove(request)
        self._free_tokens += request.most_tokens
        self.ended.append(request)


def serve_in_step(release: Release, model: Model, requests: Plan, engines: int) -> Served:
    """By engines in lock step: none begins a step before all have ended theirs, and all passes take as long as the longest.

    vLLM's data-parallel engines were, of models without experts as well, until pull request 30739.
    """
    group = [_Engine(release, model) for _ in range(engines)]
    _run(group, _ready(release, model, requests))
    return _served([request for engine in group for request in engine.ended])


def serve_apart(release: Release, model: Model, requests: Plan, engines: int) -> Served:
    """By engines of their own, which get requests in turn."""
    ready, ended = _ready(release, model, requests), list[_Request]()
    for first in range(engines):
        engine = _Engine(release, model)
        _run([engine], ready[first::engines])
        ended += engine.ended
    return _served(ended)


def _run(group: Sequence[_Engine], requests: Sequence[_Request]) -> None:
    """Serve the requests, each by the engine with the least load."""
    ready, now_s = deque(requests), 0.0
    while ready or any(engine.running or engine.waiting for engine in group):
        if not any(engine.running or engine.waiting for engine in group):
            now_s = max(now_s, ready[0].ready_s)
        while ready and ready[0].ready_s <= now_s:
            min(group, key=lambda engine: engine.load).waiting.append(ready.popleft())
        if (steady := min(engine.steady_steps for engine in group)) > 1:
            taken_s = zip(*(engine.steady_s(int(steady)) for engine in group if engine.running), strict=True)
            ends_s = list(accumulate(map(max, taken_s), initial=now_s))[1:]
            if ready:
                del ends_s[bisect_left(ends_s, ready[0].ready_s) + 1 :]
            for engine in group:
                engine.advance(ends_s)
            now_s = ends_s[-1]
            continue
        steps = [engine.next_step() for engine in group]
        now_s += max(engine.before_s(step) for engine, step in zip(group, steps, strict=True))
        now_s += max(engine.pass_s(step) for engine, step in zip(group, steps, strict=True))
        for engine, step in zip(group, steps, strict=True):
            engine.end(step, now_s)


def _ready(release: Release, model: Model, requests: Plan) -> list[_Request]:
    """The requests, once their images are preprocessed one after another. Raises ValueError for one that no engine has memory for."""
    ready: list[_Request] = []
    free_s = 0.0
    for planned in requests.requests:
        free_s = max(free_s, planned.arrival_s) + len(planned.images) * release.ahead_s
        tokens = TEMPLATE_TOKENS + planned.text_tokens + len(planned.images) * model.image_positions
        request = _Request(planned, tokens, free_s)
        if request.most_tokens > model.kv_tokens:
            raise ValueError(f"a request of {request.most_tokens} tokens exceeds the {model.kv_tokens} of an engine")
        ready.append(request)
    return ready


def _served(requests: Sequence[_Request]) -> Served:
    ordered = sorted(requests, key=lambda request: request.planned.arrival_s)
    ended_s = max((request.end_s for request in ordered), default=0.0)
    return Served([request.record for request in ordered], ended_s, [request.gaps_s for request in ordered])
