"""A stream whose router is lost goes on at another one, from each of its tokens, and its caller sees no difference."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import httpx
import pytest

from tests.router_client import LocalRouter
from tests.unit.services.router.fakes import FakeEncoder, FakeText, ask, image
from tests.unit.services.router.test_continuations import shape
from tests.unit.services.router.test_service import now_s, virtual
from triptych.client import AsyncClient, ToolChoice
from triptych.demo import MODEL_DIR
from triptych.domain.chat import ChatRequest
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.engine import ScoredToken, Scores
from triptych.domain.generation import ChatEvent, Finished, FinishReason, Ready, TextEvent, TextRequest
from triptych.domain.sampling import SamplingParams
from triptych.domain.timeline import Outcome
from triptych.errors import ContextTooLong, InstanceLost, InvalidRequest, Overloaded, TriptychError
from triptych.families.model_files import ModelFiles
from triptych.machine.router_attempts import MOST_BREAKS, RETURN_S
from triptych.media.sniff import MediaLimits
from triptych.rpc.routers import Routers
from triptych.runtime.tasks import TaskScope
from triptych.services.gateway.app import remote_media
from triptych.services.gateway.keys import KeyRing
from triptych.services.gateway.routes import create_app
from triptych.services.gateway.service import Gateway
from triptych.services.gateway.settings import GatewaySettings
from triptych.services.router.build import build
from triptych.services.router.membership import FixedMembership
from triptych.services.router.prepare import ModelPrepare
from triptych.services.router.service import RouterService
from triptych.services.router.settings import RouterSettings
from triptych.services.text.answer import Answer
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.model import fake_prompt_builder
from triptych.tokens.detokenize import IncrementalDetokenizer
from triptych.tokens.grammar import Grammars
from triptych.tokens.prompt import PromptBuilder
from triptych.tokens.template import ChatTemplate
from triptych.virtual.offload import InlineOffload
from triptych.virtual.world import virtual_world

TEMPLATE = (
    "{%- if tools -%}{{ tools | tojson }} <tool_call>{...}</tool_call>{%- endif -%}"
    "{%- for message in messages -%}{{ (message.content | string).split('</think>')[-1] }}{%- endfor -%}"
)
BUILDER = PromptBuilder.load(ModelFiles.load(MODEL_DIR))
BUILDER = replace(BUILDER, template=ChatTemplate(TEMPLATE, {}, placeholders=BUILDER.targets))


class ScriptedText(FakeText):
    """Writes given texts, one for each choice, a token per step, as a real text service does."""

    scripts: Sequence[str] = ("a long answer",)

    async def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        self.requests.append(request)
        self.running += 1
        try:
            yield (Ready((), 0.0, 0.0),)
            left: dict[int, list[int]] = {}
            answers: dict[int, Answer] = {}
            for choice, sent in request.begun.items():
                token_ids = BUILDER.tokenizer.encode(self.scripts[choice])[: request.sampling.max_tokens]
                assert tuple(token_ids[: len(sent)]) == sent
                left[choice] = token_ids[len(sent) :]
                answers[choice] = Answer(IncrementalDetokenizer(BUILDER.tokenizer), request.sampling, choice)
                answers[choice].replay(sent)
            while left:
                await self.spend(self.token_s)
                yield [event for choice in tuple(left) for event in self._step(request, answers[choice], left, choice)]
        finally:
            self.running -= 1

    def _step(
        self, request: TextRequest, answer: Answer, left: dict[int, list[int]], choice: int
    ) -> Sequence[TextEvent]:
        token = left[choice].pop(0)
        scores = () if request.sampling.logprobs is None else (Scores(ScoredToken(token, -token / 7), ()),)
        limited = answer.completion_tokens + 1 == request.sampling.max_tokens
        end = FinishReason.LENGTH if limited else FinishReason.STOP
        chunk, reason = answer.feed((token,), None if left[choice] else end, scores)
        if reason is None:
            return (chunk,)
        del left[choice]
        return (chunk, Finished(reason, answer.completion_tokens, 0.1, 0.2, choice))


class Breaking(LocalRouter):
    """A router, the connection to which can break."""

    def __init__(self, service: RouterService, site: "Site") -> None:
        self.service = service
        self.site = site
        self.continues = True
        self.refused = False
        self.connected = True
        self.requests: list[ChatRequest] = []
        self.refusals: list[TriptychError] = []

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        self.requests.append(request)
        if self.refused:
            raise InstanceLost("nobody is there")
        if self.refusals:
            raise self.refusals.pop(0)
        async with aclosing(self.service.chat(request)) as answer:
            async for events in answer:
                if self.site.cuts():
                    raise InstanceLost("the connection broke")
                yield events


@dataclass
class Site:
    """Routers over one pool, and their caller. The connection breaks before the batches of ``cut_before`` arrive, counted
    over all routers.
    """

    text: FakeText
    clients: list[Breaking] = field(default_factory=list)
    cut_before: set[int] = field(default_factory=set)
    always_cuts: bool = False
    on_cut: Callable[[], None] = lambda: None
    passed: int = 0
    routers: Routers = field(init=False)
    gateway: httpx.AsyncClient = field(init=False)
    """A client of a gateway of these routers."""

    def cuts(self) -> bool:
        is_cut = self.always_cuts or self.passed in self.cut_before
        self.cut_before -= {self.passed}
        self.passed += not is_cut
        if is_cut:
            self.on_cut()
        return is_cut

    @property
    def scripts(self) -> Sequence[str]:
        assert isinstance(self.text, ScriptedText)
        return self.text.scripts

    def refuse_all(self) -> None:
        for client in self.clients:
            client.refused, client.connected = True, False

    async def collect(self, request: ChatRequest) -> list[ChatEvent]:
        self.passed = 0
        async with aclosing(self.routers.chat(request)) as answer:
            return [event async for events in answer for event in events]

    @property
    def asked(self) -> list[ChatRequest]:
        """The requests that routers got, of the current answer."""
        return [request for client in self.clients for request in client.requests]

    def forget(self) -> None:
        self.text.requests.clear()
        for client in self.clients:
            client.requests.clear()


@asynccontextmanager
async def site(
    kind: type[FakeText] = FakeText, builder: PromptBuilder | None = None, routers: int = 2
) -> AsyncIterator[Site]:
    """Afterwards nothing runs or is held anywhere."""
    encoder = FakeEncoder("encoder-0")
    made = Site(kind("text-0", [encoder]))
    builder = builder or fake_prompt_builder()
    instances: dict[str, Any] = {"encoder-0": encoder, "text-0": made.text}
    async with TaskScope("routers") as scope:
        for number in range(routers):
            service = build(
                RouterSettings(),
                virtual_world(f"router-{number}", scope=scope, clock=now_s),
                membership=FixedMembership(instances),
                connect=instances.__getitem__,
                prepare=ModelPrepare(builder, MediaLimits(), Grammars(builder.tokenizer)),
            )
            made.clients.append(Breaking(service, made))
        await asyncio.sleep(0.1)
        by_name = {f"router-{number}": client for number, client in enumerate(made.clients)}
        made.routers = Routers(by_name.__getitem__, Random(7))
        made.routers.use(by_name)
        await made.routers.ask()
        settings = GatewaySettings()
        gateway = Gateway(
            made.routers,
            InlineOffload(),
            settings,
            now_s,
            keys=KeyRing.load(None, now_s),
            media=remote_media(settings),
        )
        transport = httpx.ASGITransport(create_app(gateway, clock=now_s))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as made.gateway:
            yield made
        await asyncio.sleep(1)
        assert not made.text.running
        assert not encoder.leases
        for client in made.clients:
            assert (client.service.running, client.service.cluster.machine.outstanding) == (0, 0)
            client.service.close()


CALL = '<tool_call>{"name": "f", "arguments": {"%s": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CASES: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "text": (["one two three, and more words yet"], {}),
    "to the limit": (["one two three, and more words yet"], {"max_tokens": 7}),
    "characters of several tokens": (["h\u00e9 \u6f22\u5b57 \U0001f642 end"], {}),
    "a stop string": (["ab cde fgh STOP no"], {"stop": ["STOP"]}),
    "text that is held back": (["ab STO ST STOP"], {"stop": ["STOP", "T ST!"], "min_tokens": 3}),
    "log-probabilities": (["one two, and more"], {"logprobs": 0}),
    "choices of several lengths": (["one", "another", "\u6f22", "the third"], {"n": 4, "logprobs": 0}),
    "tool calls": ([f"so {CALL % 'a'} {CALL % 'b'}"], {"tools": TOOLS}),
    "one tool call only": (
        [f"{CALL % 'a'}{CALL % 'b'}"],
        {"tools": TOOLS, "tool_choice": ToolChoice(parallel=False)},
    ),
    "reasoning and a tool call": ([f"<think>\nso {CALL % 'a'}\n</think>\n\nyes {CALL % 'b'}"], {"tools": TOOLS}),
    "reasoning that is cut off": (["<think> one two </thi"], {}),
    "what is no call": (["so <tool_call> x"], {"tools": TOOLS}),
    "tool calls in choices": ([CALL % "a", "no call", CALL % "c"], {"tools": TOOLS, "n": 3}),
}


async def read_all(answer: AsyncGenerator[Sequence[ChatEvent]]) -> None:
    async with aclosing(answer):
        async for _ in answer:
            pass


async def by_sdk(made: Site, options: dict[str, Any]) -> tuple[Any, int]:
    """What the SDK shows, without what is random; and the tokens of the answer."""
    async with AsyncClient(made.routers, model=FAKE_MODEL.model_id) as client:
        found = await client.chat("go", **options)
    calls = [[replace(call, call_id="") for call in choice.tool_calls] for choice in found.choices]
    choices = [replace(choice, tool_calls=()) for choice in found.choices]
    assert found.usage.completion_tokens == sum(len(choice.token_ids) for choice in choices)
    return (choices, calls, found.usage), found.usage.completion_tokens


async def by_rest(made: Site, options: dict[str, Any]) -> tuple[Any, int]:
    """The same of a stream of server-sent events."""
    body: dict[str, Any] = {"model": FAKE_MODEL.model_id, "messages": [{"role": "user", "content": "go"}], **options}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    if "tool_choice" in body:
        body |= {"tool_choice": "auto", "parallel_tool_calls": False}
    response = await made.gateway.post("/v1/chat/completions", json=body)
    *lines, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert (response.status_code, end) == (200, "[DONE]"), response.text
    told: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    for chunk in map(json.loads, lines):
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            choice = told.setdefault(
                part["index"], {"text": "", "thought": "", "calls": [], "logprobs": [], "reasons": []}
            )
            choice["text"] += part["delta"].get("content") or ""
            choice["thought"] += part["delta"].get("reasoning") or ""
            choice["calls"] += [{**call, "id": ""} for call in part["delta"].get("tool_calls") or ()]
            choice["logprobs"] += (part.get("logprobs") or {}).get("content") or ()
            choice["reasons"] += [part["finish_reason"]] if part["finish_reason"] else []
    thought = any(choice["thought"] for choice in told.values())
    assert thought == (usage["completion_tokens_details"]["reasoning_tokens"] > 0) == ("<think>" in made.scripts[0])
    return (told, usage), usage["completion_tokens"]


@pytest.mark.slow
@virtual
@pytest.mark.parametrize("through", [by_sdk, by_rest])
@pytest.mark.parametrize("name", CASES)
async def test_an_answer_goes_on_from_every_position(
    name: str, through: Callable[[Site, dict[str, Any]], Awaitable[tuple[Any, int]]]
) -> None:
    scripts, options = CASES[name]
    options = {"max_tokens": 400} | options
    async with site(ScriptedText, BUILDER) as made:
        assert isinstance(made.text, ScriptedText)
        made.text.scripts = scripts

        async def answered(cut_before: set[int]) -> tuple[Any, int]:
            made.forget()
            made.cut_before, made.passed = cut_before, 0
            return await through(made, options)

        whole = await answered(set())
        batches = made.passed
        assert whole[1] >= batches >= 4
        for position in range(batches):
            assert await answered({position}) == whole, position
            first, rest = made.text.requests
            assert first.sampling == rest.sampling
            assert len(made.asked) == 2
        assert await answered({0, 1, 2, batches - 1}) == whole
        assert made.routers.continuations == batches - 1 + 3


@virtual
async def test_the_other_router_s_timeline_tells_what_came_from_the_first() -> None:
    async with site() as made:
        made.cut_before = {2}
        request = ask("r", [image(1)], sampling=SamplingParams(max_tokens=16, n=2))
        events = await made.collect(request)
        assert shape(events) == (dict.fromkeys((0, 1), ((0, 1, 2, 3), "w0 w1 w2 w3 ", FinishReason.STOP)), 8)
        first, second = made.asked
        assert (first.continued, second.continued) == ((), tuple(ContinuedChoice(c, (0, 1)) for c in (0, 1)))
        assert first.sampling.seed is not None
        assert second == replace(first, continued=second.continued, timeout_s=second.timeout_s)
        assert second.timeout_s < first.timeout_s
        (client,) = (fake for fake in made.clients if fake.requests == [second])
        timeline = await client.timeline("r")
        assert (timeline.outcome, timeline.completion_tokens, timeline.continued_tokens) == (Outcome.DONE, 8, 4)
        assert (timeline.continuations, timeline.text_attempts) == (1, 1)
        assert timeline.ttft_s == 0 < timeline.interrupted_s < timeline.total_s == timeline.decode_s
        assert 0 < timeline.encode_s < timeline.total_s


@virtual
async def test_a_text_instance_and_a_router_may_be_lost_in_one_answer() -> None:
    async with site() as made:
        made.cut_before, made.passed = {2}, 0
        events: list[ChatEvent] = []
        async for batch in made.routers.chat(ask("r", sampling=SamplingParams(max_tokens=16))):
            events += batch
            if made.passed == 3:  # at the second router
                made.passed += 1
                made.text.kill()
                await asyncio.sleep(0.2)
                made.text.restart()
        assert shape(events) == ({0: ((0, 1, 2, 3), "w0 w1 w2 w3 ", FinishReason.STOP)}, 4)
        assert [request.begun[0] for request in made.text.requests] == [(), (0, 1), (0, 1, 2)]


@virtual
async def test_a_single_router_goes_on_when_it_is_back_in_time() -> None:
    async with site(routers=1) as made:
        (client,) = made.clients
        made.cut_before, made.on_cut = {1}, made.refuse_all
        asyncio.get_running_loop().call_later(RETURN_S - 1, lambda: setattr(client, "refused", False))
        events = await made.collect(ask("r", sampling=SamplingParams(max_tokens=16)))
        assert shape(events) == ({0: ((0, 1, 2, 3), "w0 w1 w2 w3 ", FinishReason.STOP)}, 4)


@virtual
@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.parametrize(("timeout_s", "looked_s"), [(60.0, RETURN_S), (3.0, 3.0)])
async def test_without_a_router_the_error_is_that_of_the_lost_one(
    position: int, timeout_s: float, looked_s: float
) -> None:
    async with site() as made:
        made.cut_before, made.on_cut = {position}, made.refuse_all
        began_s = now_s()
        with pytest.raises(InstanceLost, match="the connection broke"):
            await made.collect(ask("r", sampling=SamplingParams(max_tokens=16), timeout_s=timeout_s))
        assert now_s() - began_s == pytest.approx(looked_s, abs=0.1)


@virtual
async def test_a_router_that_has_no_room_is_asked_again() -> None:
    async with site(routers=1) as made:
        (client,) = made.clients
        still_runs = InvalidRequest("request 'r' is running already", param="request_id")
        made.cut_before = {2}
        made.on_cut = lambda: client.refusals.extend([Overloaded("full"), still_runs, Overloaded("full")])
        assert shape(await made.collect(ask("r", sampling=SamplingParams(max_tokens=16))))[1] == 4
        assert len(made.asked) == 5


@virtual
async def test_an_answer_that_loses_every_router_ends() -> None:
    """An answer may be what kills them. What the first one sent does not help it."""
    async with site() as made:
        made.always_cuts = True
        with pytest.raises(InstanceLost, match="the connection broke"):
            await made.collect(ask("r"))
        assert len(made.asked) == MOST_BREAKS + 1
        made.forget()
        made.always_cuts, made.cut_before = False, {1}
        made.on_cut = lambda: setattr(made, "always_cuts", True)
        with pytest.raises(InstanceLost, match="the connection broke"):
            await made.collect(ask("r2"))
        assert len(made.asked) == 1 + MOST_BREAKS + 1


@virtual
async def test_an_answer_outlasts_more_routers_that_are_restarted_than_one_may_lose_without_output() -> None:
    """Each of them drains for less time than the answer takes, and then ends its stream."""
    async with site(ScriptedText, BUILDER) as made:
        assert isinstance(made.text, ScriptedText)
        made.text.scripts = ["one two three, and more words yet"]
        request = ask("r", sampling=SamplingParams(max_tokens=400))
        whole = shape(await made.collect(request))
        restarts = made.passed - 1
        assert restarts > MOST_BREAKS
        made.forget()
        made.cut_before = set(range(1, made.passed))
        assert shape(await made.collect(request)) == whole
        assert len(made.asked) == restarts + 1


@virtual
async def test_an_error_of_a_router_that_lives_is_the_answer_s() -> None:
    async with site() as made:
        made.text.finishes = False
        with pytest.raises(InstanceLost):
            await made.collect(ask("r"))
        told = InstanceLost("text instance text-0 was lost")
        told.sent_by_peer = True
        made.forget()
        for client in made.clients:
            client.refusals = [told]
        with pytest.raises(InstanceLost, match="text-0"):
            await made.collect(ask("r2"))
        assert len(made.asked) == 1


@virtual
async def test_a_router_of_the_release_before_gets_no_continuation() -> None:
    async with site() as made:
        for client in made.clients:
            client.continues = False
        made.cut_before = {2}
        began_s = now_s()
        with pytest.raises(InstanceLost, match="the connection broke"):
            await made.collect(ask("r"))
        assert now_s() - began_s < 1, "there is nothing to wait for"
        made.forget()
        made.cut_before = {0}
        assert shape(await made.collect(ask("r2")))[1] == 4, "what has not begun is repeated"


@virtual
async def test_a_continuation_that_ends_before_its_text_instance_has_begun_counts_what_its_caller_has() -> None:
    async with site(routers=1) as made:
        (client,) = made.clients
        sampling = SamplingParams(max_tokens=FAKE_MODEL.context_length, seed=1)
        request = replace(ask("r", sampling=sampling), continued=(ContinuedChoice(0, (0, 1)),))
        with pytest.raises(ContextTooLong):
            await read_all(client.chat(request))
        timeline = await client.timeline("r")
        assert (timeline.outcome, timeline.completion_tokens, timeline.continued_tokens) == (Outcome.FAILED, 2, 2)
        made.text.kill()
        request = replace(request, request_id="left", sampling=SamplingParams(max_tokens=16, seed=1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await read_all(client.chat(request))
        await client.service.drain()
        timeline = await client.timeline("left")
        assert (timeline.outcome, timeline.completion_tokens, timeline.continued_tokens) == (Outcome.CANCELLED, 2, 2)


@virtual
@pytest.mark.parametrize(
    ("continued", "changes", "param"),
    [
        (((1, 0), (0, 0)), {"n": 2}, "continued"),
        (((0, 0), (0, 0)), {"n": 2}, "continued"),
        (((2, 0),), {"n": 2}, "continued"),
        (((0, 0),), {"seed": None}, "seed"),
        (((0, 16),), {}, "continued"),
        (((0, FAKE_MODEL.context_length),), {"max_tokens": None}, "continued"),
        (((0, FAKE_MODEL.context_length),), {"max_tokens": 1 << 20}, "continued"),
    ],
)
async def test_a_continuation_that_cannot_be_is_refused(
    continued: tuple[tuple[int, int], ...], changes: dict[str, Any], param: str
) -> None:
    async with site() as made:
        sampling = replace(SamplingParams(max_tokens=16, seed=1), **changes)
        choices = tuple(ContinuedChoice(choice, (0,) * count) for choice, count in continued)
        with pytest.raises(InvalidRequest) as raised:
            await read_all(made.clients[0].chat(replace(ask("r", sampling=sampling), continued=choices)))
        assert raised.value.param == param
        assert not made.text.requests
