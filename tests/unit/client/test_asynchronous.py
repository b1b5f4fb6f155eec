"""The SDK against a router in this process (partly under virtual time), and over gRPC."""

import asyncio
import dataclasses
import json
import socket
import subprocess
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.foreign_server import foreign_server
from tests.unit.client.scripted import END, HELLO, MODEL, USAGE, ScriptedRouter, behind_grpc
from triptych import AsyncClient
from triptych.client import RawPrompt, RetryPolicy, Tenant, ToolCall, ToolChoice, assistant, system, tool, user
from triptych.client.asynchronous import ChatStream
from triptych.client.options import SamplingOptions
from triptych.domain.chat import TextPart
from triptych.domain.generation import ChatFinished, ChoiceFinished, FinishReason, Reasoned, TokenChunk, ToolCallMade
from triptych.domain.sampling import SamplingParams
from triptych.errors import (
    Cancelled,
    DeadlineExceeded,
    InstanceLost,
    InvalidMedia,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestTooLarge,
    TriptychError,
    Unavailable,
)
from triptych.rpc.server import RpcServer
from triptych.virtual import virtual_time


async def test_a_question_about_images_is_answered_over_grpc(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"first")
    router = ScriptedRouter()
    async with behind_grpc(router) as target, AsyncClient(target) as client:
        answer = await client.chat(
            "What?", images=[tmp_path / "a.png", b"second"], max_tokens=7, temperature=0, priority=-1
        )
        assert (await client.timeline(answer.request_id)).text_instance == "text-1"
        assert await client.tokenize([system("Be brief."), user("Hi")]) == (0, 1)
        assert (await client.models(), (await client.ready()).ready) == ((MODEL,), True)
    assert (answer.text, answer.choices[0].token_ids) == ("Hello", (1, 2, 3))
    assert (answer.finish_reason, answer.usage, answer.model) == (FinishReason.STOP, USAGE, "demo")
    (request,) = router.requests
    assert [part.data for part in request.media] == [b"first", b"second"]
    assert request.messages[0].parts[-1] == TextPart("What?")
    assert request.sampling == SamplingParams(max_tokens=7, temperature=0, seed=request.sampling.seed)
    assert request.sampling.seed is not None, "for a router that goes on with the answer"
    assert (100 < request.timeout_s <= 120, request.priority) == (True, -1)


@pytest.mark.parametrize(
    ("given", "sent"),
    [("team", Tenant("team", 1.0)), (Tenant("team", 2.5), Tenant("team", 2.5)), (None, None)],
)
async def test_a_request_names_whose_share_it_counts_against(given: Tenant | str | None, sent: Tenant | None) -> None:
    router = ScriptedRouter()
    async with behind_grpc(router) as target, AsyncClient(target) as client:
        await client.chat("Hi", tenant=given)
    (request,) = router.requests
    assert request.tenant == sent


async def test_a_client_in_a_second_event_loop_gets_an_error_of_the_tree() -> None:
    async with behind_grpc(ScriptedRouter()) as target:
        client = AsyncClient(target)
        await client.models()
        for call in (client.models, partial(client.chat, "Hi"), client.close):
            with pytest.raises(InvalidRequest, match="belongs to the event loop"):
                await asyncio.to_thread(lambda call: asyncio.run(call(), debug=False), call)
        assert await client.models() == (MODEL,), "it goes on where it belongs"
        await client.close()


def test_a_client_of_a_closed_event_loop_can_only_be_closed(target: str) -> None:
    client = AsyncClient(target)
    assert asyncio.run(client.models()) == (MODEL,)
    with pytest.raises(InvalidRequest, match="belongs to the event loop"):
        asyncio.run(client.models())
    asyncio.run(client.close())


async def test_an_answer_is_streamed_as_it_is_generated() -> None:
    more = asyncio.Event()
    router = ScriptedRouter((HELLO[0], more, *HELLO[1:]))
    async with (
        behind_grpc(router) as target,
        AsyncClient(target, model="demo") as client,
        client.stream("Hi") as stream,
    ):
        assert (await anext(stream)).text == "Hel"
        assert (stream.finish_reason, stream.usage) == (None, None)
        more.set()
        assert [chunk.text async for chunk in stream] == ["lo"]
        assert (stream.finish_reason, stream.usage) == (FinishReason.STOP, USAGE)
    assert router.model_lookups <= 1, "none for the request"


async def test_closing_a_stream_cancels_the_request() -> None:
    router = ScriptedRouter((HELLO[0], asyncio.Event()))
    async with behind_grpc(router) as target, AsyncClient(target) as client:
        async with client.stream("Hi") as stream:
            await anext(stream)
            assert not router.closed.is_set()
        async with asyncio.timeout(5):
            await router.closed.wait()


async def test_reading_a_closed_stream_is_an_error() -> None:
    async with AsyncClient(ScriptedRouter()) as client:
        async with client.stream("Hi") as stream:
            await anext(stream)
        with pytest.raises(Cancelled, match="was left"):
            await anext(stream)
        with pytest.raises(Cancelled, match="was left"):
            await stream.collect()


async def test_a_finished_stream_stays_finished() -> None:
    async with AsyncClient(ScriptedRouter()) as client:
        async with client.stream("Hi") as stream:
            assert [chunk.text async for chunk in stream] == ["Hel", "lo"]
        assert [chunk async for chunk in stream] == []


async def refused(stream: ChatStream) -> None:
    with pytest.raises(Cancelled, match="closed"):
        await stream.collect()


async def test_closing_the_client_ends_pending_requests() -> None:
    router = ScriptedRouter((HELLO[0], asyncio.Event()))
    async with behind_grpc(router) as target:
        client = AsyncClient(target, model="demo")
        async with client.stream("Hi") as stream:
            await anext(stream)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(refused(stream))
                await asyncio.sleep(0)
                await client.close()
        with pytest.raises(Cancelled, match="closed"):
            async with client.stream("Hi"):
                pass


async def test_cancelling_the_calling_task_cancels_the_request() -> None:
    router = ScriptedRouter((asyncio.Event(),))
    async with behind_grpc(router) as target, AsyncClient(target, model="demo") as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.chat("Hi")
        async with asyncio.timeout(5):
            await router.closed.wait()


async def test_a_conversation_is_sent_in_order() -> None:
    router = ScriptedRouter()
    async with AsyncClient(router) as client:
        await client.chat([system("Be brief."), user("What?", [b"x"]), assistant("A 3."), user("Sure?")])
    (request,) = router.requests
    assert [message.role for message in request.messages] == ["system", "user", "assistant", "user"]
    assert [part.data for part in request.media] == [b"x"]


async def test_choices_are_assembled_separately() -> None:
    script = (
        TokenChunk((1,), "a", choice=1),
        TokenChunk((2,), "b"),
        ChoiceFinished(FinishReason.LENGTH, 1),
        TokenChunk((3,), "c"),
        *END,
    )
    async with AsyncClient(ScriptedRouter(script)) as client:
        answer = await client.chat("Hi", n=2)
    assert [(choice.text, choice.finish_reason.value) for choice in answer.choices] == [("bc", "stop"), ("a", "length")]


async def test_tool_calls_are_separated_from_text() -> None:
    first, second, other = (ToolCall(f"c{number}", "look", "{}") for number in range(3))
    script = (
        TokenChunk((1,), "I look."),
        ToolCallMade(first, 0),
        ToolCallMade(other, 0, choice=1),
        TokenChunk((2,), ""),
        ToolCallMade(second, 1),
        ChoiceFinished(FinishReason.TOOL_CALLS, 1),
        ChoiceFinished(FinishReason.TOOL_CALLS),
        ChatFinished(USAGE),
    )
    router = ScriptedRouter(script)
    async with behind_grpc(router) as target, AsyncClient(target) as client:
        answer = await client.chat("Hi", n=2, tools=[{"type": "function"}], tool_choice=ToolChoice(required=True))
        assert (answer.text, answer.tool_calls) == ("I look.", (first, second))
        assert (answer.choices[1].text, answer.choices[1].tool_calls) == ("", (other,))
        async with client.stream("Hi", n=2) as stream:
            await anext(stream)
            assert not stream.tool_calls
            assert [chunk.token_ids async for chunk in stream] == [(2,)]
            assert [stream.tool_calls_of(choice) for choice in (0, 1)] == [(first, second), (other,)]
        await client.chat([user("Hi"), assistant("", answer.tool_calls[:1]), tool(first, "a cat")], n=2)
    assert router.requests[0].tool_choice == ToolChoice(required=True)
    _, asked, told = router.requests[2].messages
    assert (asked.tool_calls, told.role, told.tool_call_id) == ((first,), "tool", "c0")


async def test_reasoning_is_separated_from_text() -> None:
    script = (
        TokenChunk((1,), ""),
        Reasoned("Hm. "),
        Reasoned("Two?", 1),
        TokenChunk((2,), ""),
        Reasoned("A cat?"),
        TokenChunk((3,), "A cat."),
        ChoiceFinished(FinishReason.STOP, 1),
        ChoiceFinished(FinishReason.STOP),
        ChatFinished(USAGE),
    )
    router = ScriptedRouter(script)
    async with behind_grpc(router) as target, AsyncClient(target) as client:
        answer = await client.chat("Hi", n=2, template_kwargs={"enable_thinking": True})
        assert (answer.text, answer.reasoning, answer.choices[1].reasoning) == ("A cat.", "Hm. A cat?", "Two?")
        async with client.stream(
            [user("Hi"), assistant("A cat.", reasoning=answer.reasoning), user("Oh")], n=2
        ) as stream:
            assert "".join([chunk.text async for chunk in stream]) == "A cat."
            assert (stream.reasoning, stream.reasoning_of(1)) == ("Hm. A cat?", "Two?")
    assert router.requests[0].separates_reasoning
    assert [request.template_kwargs for request in router.requests] == ['{"enable_thinking": true}', ""]
    assert router.requests[1].messages[1].reasoning == "Hm. A cat?"


def test_the_arguments_of_a_call_are_read_by_name() -> None:
    assert ToolCall("c0", "look", '{"at": "cat"}').values == {"at": "cat"}


def test_every_sampling_field_is_an_option() -> None:
    assert set(SamplingOptions.__annotations__) == {field.name for field in dataclasses.fields(SamplingParams)}


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_retryable_error_is_retried() -> None:
    router = ScriptedRouter((Unavailable("x"),), (Overloaded("x", retry_after_s=2.0),), HELLO)

    async def scenario() -> float:
        answer = await AsyncClient(router).chat("Hi")
        assert answer.text == "Hello"
        assert answer.request_id == router.requests[-1].request_id
        return asyncio.get_running_loop().time()

    took_s = virtual_time.run(scenario())
    assert 2.0 <= took_s < 2.5
    assert len({request.request_id for request in router.requests}) == 3
    assert router.requests[-1].timeout_s <= 118.0, "the deadline is one for all attempts"


@pytest.mark.parametrize("error", [InvalidMedia("image 1 is none"), Unavailable("down")])
def test_an_error_is_raised_unchanged(error: TriptychError) -> None:
    router = ScriptedRouter((error,))

    async def scenario() -> None:
        with pytest.raises(type(error), match=error.message):
            await AsyncClient(router).chat("Hi")

    virtual_time.run(scenario())
    assert len(router.requests) == (4 if error.retryable else 1)


def test_no_retry_after_the_first_token() -> None:
    router = ScriptedRouter((HELLO[0], InstanceLost("text-1 is gone")))

    async def scenario() -> None:
        async with AsyncClient(router).stream("Hi") as stream:
            assert (await anext(stream)).text == "Hel"
            with pytest.raises(InstanceLost):
                await anext(stream)

    virtual_time.run(scenario())
    assert len(router.requests) == 1


def test_a_truncated_stream_is_an_error() -> None:
    async def scenario() -> None:
        with pytest.raises(InstanceLost, match="broke off"):
            await AsyncClient(ScriptedRouter(HELLO[:2])).chat("Hi")

    virtual_time.run(scenario())


def test_a_call_ends_with_its_deadline() -> None:
    router = ScriptedRouter((asyncio.Event(),))

    async def scenario() -> float:
        with pytest.raises(DeadlineExceeded):
            await AsyncClient(router).chat("Hi", timeout_s=3)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(scenario()) == pytest.approx(3)
    assert router.closed.is_set()


async def test_a_refused_connection_is_unavailable_within_the_deadline() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable, match=r"nothing answers at 127\.0\.0\.1:1: is a router's gRPC there") as caught:
            await client.ready(timeout_s=1)
    assert type(caught.value) is Unavailable
    assert caught.value.retryable


async def test_of_several_routers_another_one_answers_when_one_is_away_or_drains() -> None:
    first, second = ScriptedRouter(), ScriptedRouter()
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(behind_grpc(second))
        async with behind_grpc(first) as b:
            client = await stack.enter_async_context(AsyncClient(f"{a}, {b},127.0.0.1:1"))
            for _ in range(4):
                assert (await client.chat("Hi")).text == "Hello"
            assert len(first.requests) == len(second.requests) == 2
            first.scripts = ([Unavailable("the router is shutting down")],)
            for _ in range(4):
                assert (await client.chat("Hi")).text == "Hello"
            first.scripts = (HELLO,)
        before = len(second.requests)
        for _ in range(4):
            assert (await client.chat("Hi")).text == "Hello"
        assert len(second.requests) == before + 4
        assert (await client.models(), (await client.ready()).ready) == ((MODEL,), True)
        assert (await client.timeline(second.requests[-1].request_id)).text_instance == "text-1"


async def test_a_request_that_had_output_is_not_sent_to_another_router() -> None:
    routers = [ScriptedRouter([TokenChunk((1,), "Hel"), InstanceLost("lost")]) for _ in range(2)]
    async with behind_grpc(routers[0]) as a, behind_grpc(routers[1]) as b, AsyncClient(f"{a},{b}") as client:
        with pytest.raises(InstanceLost):
            await client.chat("Hi")
        assert sum(len(router.requests) for router in routers) == 1


@pytest.mark.slow
async def test_a_request_without_output_goes_on_at_another_router_when_its_own_is_killed() -> None:
    command = (sys.executable, "-m", "tests.unit.client.serving")
    router = ScriptedRouter()
    router.models_served = (MODEL, dataclasses.replace(MODEL, model_id="of-the-test"))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        async with behind_grpc(router) as other, AsyncClient(f"{address},{other}", model="demo") as client:
            while len(await client.models()) != 3:  # noqa: ASYNC110 - asked over gRPC
                await asyncio.sleep(0.05)
            async with asyncio.TaskGroup() as group:
                waiting = [group.create_task(client.chat("Hi")) for _ in range(2)]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                process.kill()
            assert [task.result().text for task in waiting] == ["Hello", "Hello"]
            assert len(router.requests) == 2
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_without_any_router_of_several_that_is_said() -> None:
    async with AsyncClient("127.0.0.1:1,127.0.0.1:2", timeout_s=20) as client:
        with pytest.raises(Unavailable, match=r"nothing answers at 127.0.0.1:1 or 127.0.0.1:2"):
            await client.chat("Hi")


async def test_a_port_without_grpc_is_named() -> None:
    with foreign_server() as port:
        async with AsyncClient(f"127.0.0.1:{port}", retry=RetryPolicy(max_attempts=1)) as client:
            with pytest.raises(Unavailable, match=f"nothing answers at 127.0.0.1:{port}"):
                await client.chat("Hi", timeout_s=5)


async def test_a_port_of_another_service_is_named() -> None:
    """As that of an encoder."""
    no_retry = RetryPolicy(max_attempts=1)
    async with RpcServer(host="127.0.0.1", port=0, service_names=(), register=lambda _: None) as server:
        target = f"127.0.0.1:{server.port}"
        async with (
            AsyncClient(target, retry=no_retry) as client,
            AsyncClient(target, model="m", retry=no_retry) as named,
        ):
            for call in (client.models(), client.ready(), client.chat("Hi"), named.chat("Hi"), named.tokenize("Hi")):
                with pytest.raises(Unavailable, match=f"^no router at {target}: another service answers there"):
                    await call


async def test_an_unresponsive_host_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"127.0.0.1:{server.getsockname()[1]}"
        async with AsyncClient(target) as client:
            with pytest.raises(
                (Unavailable, DeadlineExceeded), match=f"(nothing answers at|no connection to) {target}"
            ):
                await client.models(timeout_s=0.3)


async def test_a_raw_prompt_and_tools_are_sent_unchanged() -> None:
    router = ScriptedRouter()
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    async with behind_grpc(router) as target, AsyncClient(target, model="demo") as client:
        assert (await client.chat(RawPrompt("1 2 3"), max_tokens=4)).text == "Hello"
        await client.chat("Hi", tools=tools)
        assert await client.tokenize(RawPrompt("1 2 3")) == ()
    raw, with_tools = router.requests
    assert (raw.prompt, raw.messages, raw.sampling.max_tokens) == ("1 2 3", (), 4)
    assert (with_tools.prompt, json.loads(with_tools.tools)) == (None, tools)


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        (RawPrompt("1"), {"images": [b"x"]}, "neither images nor tools"),
        (RawPrompt("1"), {"tools": [{}]}, "neither images nor tools"),
        ("Hi", {"tools": {"type": "function"}}, "a list of tools"),
        ("Hi", {"tools": "[]"}, "a list of tools"),
        ("Hi", {"tools": [{"a": b"x"}]}, "cannot be written as JSON"),
    ],
)
async def test_an_invalid_request_is_refused_by_the_client(prompt: Any, options: dict[str, Any], said: str) -> None:
    router = ScriptedRouter()
    async with AsyncClient(router) as client:
        with pytest.raises(InvalidRequest, match=said):
            await client.chat(prompt, **options)
    assert router.requests == []


async def test_invalid_arguments_are_refused_before_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    router = ScriptedRouter()
    with pytest.raises(InvalidRequest, match="HOST:PORT"):
        AsyncClient("http://127.0.0.1:8000")
    async with AsyncClient(router) as client:
        with pytest.raises(InvalidRequest, match="a list of images"):
            await client.chat("Hi", images="a.png")
        with pytest.raises(InvalidRequest, match="in its messages"):
            await client.chat([user("Hi")], images=[b"x"])
        with pytest.raises(InvalidMedia, match="fetches nothing"):
            await client.chat("Hi", images=["https://example.org/a.png"])
        monkeypatch.setattr("triptych.client.asynchronous.MAX_MESSAGE_NBYTES", 1 << 20)
        with pytest.raises(RequestTooLarge):
            await client.chat("Hi", images=[b"x"])
        with pytest.raises(NotFound):
            await client.timeline("nobody")
        router.models_served = ()
        with pytest.raises(Unavailable, match="no model"):
            await client.chat("Hi")
    with pytest.raises(Cancelled, match="closed"):
        await client.models()
    assert router.requests == []


async def test_images_are_resolved_and_held_within_the_context() -> None:
    router = ScriptedRouter()
    async with AsyncClient(router) as client:
        async with client.resolve([b"x", b"y"], tenant_salt=b"t", priority=2, timeout_s=9.0) as items:
            assert items == ()
            assert not router.closed.is_set()
        assert router.closed.is_set()
        (asked,) = router.resolves
        assert [part.data for part in asked.media] == [b"x", b"y"]
        assert (asked.model, asked.keys, asked.tenant_salt, asked.priority) == ("demo", (), b"t", 2)
        assert 8.0 < asked.timeout_s <= 9.0
        for refused in ("x.png", 7):
            with pytest.raises(TriptychError):
                async with client.resolve(refused):  # type: ignore[arg-type]
                    pass
        router.resolved = InvalidMedia("it is none", param="media[0]")
        with pytest.raises(InvalidMedia):
            async with client.resolve([b"x"]):
                pass


async def test_an_answer_without_choices_is_an_internal_error() -> None:
    async with AsyncClient(ScriptedRouter((ChatFinished(USAGE),))) as client, client.stream("Hi") as stream:
        assert isinstance(stream, ChatStream)
        with pytest.raises(TriptychError, match="without any choice"):
            await stream.collect()


@pytest.mark.slow
def test_the_base_install_is_enough() -> None:
    """The SDK imports nothing that only services, engines or the command need."""
    heavy = [
        "pydantic",
        "torch",
        "tokenizers",
        "PIL",
        "numpy",
        "httpx",
        "rich",
        "typer",
        "starlette",
        "xxhash",
        "uvloop",
    ]
    script = (
        "import sys, triptych\n"
        "assert 'grpc' not in sys.modules and 'triptych.client' not in sys.modules\n"
        "from triptych import AsyncClient, Client\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert out == "[]\n"
