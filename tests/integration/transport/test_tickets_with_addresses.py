"""A text instance finds the holder by the ticket's address; forged tickets reveal and damage nothing."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace

import pytest

from tests.e2e.reference import DIGITS
from triptych import demo
from triptych.domain.chat import ChatRequest, MediaPart, Message, TextPart
from triptych.domain.embedding import Ticket
from triptych.domain.encoding import EncodeRequest
from triptych.domain.generation import Finished, Placement, TextRequest
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.engine.decoder.options import EngineOptions
from triptych.errors import InvalidRequest, TransferFailed
from triptych.families.model_files import ModelFiles
from triptych.media.sniff import MediaLimits
from triptych.rpc.stubs import InstanceStub
from triptych.services.encoder.app import app as encoder_app
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.router.prepare import ModelPrepare
from triptych.services.text.app import app as text_app
from triptych.services.text.settings import TextSettings
from triptych.tokens.grammar import Grammars
from triptych.tokens.prompt import PromptBuilder
from triptych.transport.options import TransferOptions

MIB = 1 << 20


@dataclass
class Site:
    """An encoder with one embedding, and a text instance without a link to it."""

    text: InstanceStub
    request: TextRequest

    def with_tickets(self, change: Mapping[str, object]) -> TextRequest:
        [placement] = self.request.placements
        ticket: Ticket = replace(placement.ticket, **change)  # type: ignore[arg-type]
        return replace(self.request, placements=(replace(placement, ticket=ticket),))

    async def ask(self, request: TextRequest) -> bool:
        """Whether the answer was complete."""
        async with aclosing(self.text.generate(request)) as stream:
            events = [event async for together in stream for event in together]
        return isinstance(events[-1], Finished)


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    model = {
        "model": demo.MODEL_DIR,
        "model_id": demo.MODEL_ID,
        "transfers": TransferOptions(("shm", "tcp")),
        "port": 0,
    }
    async with AsyncExitStack() as stack:
        encoder = await stack.enter_async_context(encoder_app(EncoderSettings(**model, arena_bytes=MIB)))  # type: ignore[arg-type]
        small = {"image_cache_bytes": MIB, "engine": EngineOptions(kv_cache_bytes=MIB)}
        running = await stack.enter_async_context(text_app(TextSettings(**model, **small)))  # type: ignore[arg-type]
        stub, text = (InstanceStub(f"127.0.0.1:{instance.port}") for instance in (encoder, running))
        stack.push_async_callback(stub.close)
        stack.push_async_callback(text.close)
        info = (await text.describe()).model
        builder = PromptBuilder.load(ModelFiles.load(demo.MODEL_DIR))
        prepare = ModelPrepare(builder, MediaLimits(), Grammars(builder.tokenizer))
        parts = MediaPart(Modality.IMAGE, (DIGITS / "3_a.png").read_bytes()), TextPart("What digits are shown?")
        sampling = SamplingParams(temperature=0, max_tokens=4)
        prompted = prepare(ChatRequest("r", info.model_id, (Message("user", parts),), sampling), info)
        [item] = prompted.items
        result = await stub.encode(
            EncodeRequest(
                "r", 0, info.model_id, parts[0].data, item.info, item.tokens, b"", 10.0, 60.0, b"r" * 16, b"o" * 16
            )
        )
        address = f"127.0.0.1:{encoder.port}"
        placement = Placement(0, item.start, replace(result.ticket, address=address))
        request = TextRequest("r", info.model_id, prompted.token_ids, (placement,), sampling, 20.0)
        yield Site(text, request)


@contextmanager
def refusing_server() -> Iterator[str]:
    """The address of a server that closes every connection.

    It is no ``asyncio`` server: one that is closed while it accepts leaves an unclosed transport (Python 3.11).
    """
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)

        def hang_up() -> None:
            with suppress(OSError):
                server.accept()[0].close()

        loop.add_reader(server, hang_up)
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            loop.remove_reader(server)


async def test_an_unknown_encoder_is_found_by_the_tickets_address() -> None:
    async with site() as here:
        assert await here.ask(here.request)


async def test_tampered_and_dead_addresses_fail_their_item_with_the_same_error() -> None:
    async with site() as here:
        with refusing_server() as taken:
            messages = set()
            for address in ("127.0.0.1:1", taken):
                with pytest.raises(TransferFailed) as raised:
                    await here.ask(here.with_tickets({"address": address}))
                assert raised.value.items == (0,)
                messages.add(raised.value.message)
            assert len(messages) == 1, "closed and unanswered ports must give the same error"
        for change, told in (
            ({"address": ""}, "is refused: it is not HOST:PORT"),
            ({"address": "unix:/run/secret"}, "is refused: it is not HOST:PORT"),
            ({"address": "10.0.0.1:50061"}, "is refused: it is not a loopback address"),
            ({"holder": "stranger"}, "is not where its ticket says"),
            ({"epoch": 7}, "is not where its ticket says"),
        ):
            with pytest.raises(TransferFailed, match=told) as raised:
                await here.ask(here.with_tickets(change))
            assert raised.value.items == (0,)
        with pytest.raises(InvalidRequest, match=r"ticket\.address has 263 characters"):
            await here.ask(here.with_tickets({"address": "a" * 263}))
        assert await here.ask(here.request), "the genuine ticket still works"
