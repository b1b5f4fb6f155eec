"""Processes of ``benchmarks.router_overhead``: fake encoders, a fake text instance, and a bare relay.

``peers``: the real text service over ``FakeTextEngine`` with answers of the requested length, one step every
``step_s``; encoders that answer at once with a ticket. Nothing is pulled: only what lies between is measured.

``relay``: a router that does nothing: one grpc.aio handler that encodes all items in parallel, sends the text request
with their tickets, and forwards each event. Same calls, same messages, no decisions.
"""

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop

from benchmarks import identity
from triptych.demo import MODEL_DIR
from triptych.domain.embedding import EMBEDS, DType, LeaseId, TensorSpec, Ticket, payload_nbytes
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.domain.generation import Placement
from triptych.domain.instance import InstanceInfo, InstanceLoad, ServedPart, StageLoad
from triptych.domain.limits import MAX_MESSAGE_NBYTES
from triptych.domain.profile import ProfileIdentity
from triptych.domain.queue_position import QueuePosition
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.errors import TransferFailed
from triptych.families.model_files import ModelFiles
from triptych.families.registry import written_family
from triptych.ports import HolderStub
from triptych.rpc import limits
from triptych.rpc.encoder import EncoderServicer
from triptych.rpc.instance import InstanceServicer
from triptych.rpc.server import RpcServer
from triptych.runtime.tls import TlsIdentity
from triptych.runtime.world import real_world
from triptych.services.text.build import build
from triptych.services.text.service import LoadedText
from triptych.services.text.servicer import TextServicer
from triptych.services.text.settings import TextSettings
from triptych.testing.fakes import FAKE_MODEL, FAKE_PLACEHOLDER_ID, FakeTextEngine
from triptych.testing.loras import NoLoras
from triptych.tokens.detokenize import IncrementalDetokenizer
from triptych.tokens.grammar import Grammars
from triptych.tokens.tokenizer import Tokenizer
from triptych.transport.data_plane import MemoryDataPlane
from triptych.transport.memory import MemoryNetwork
from triptych.transport.receiver import Arrived, TensorReceiver
from triptych.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc, router_pb2, router_pb2_grpc, text_pb2, text_pb2_grpc

HOST = "127.0.0.1"
IMAGE_TOKENS = 16
"""Tokens per item in the relay's requests, which does not count them itself."""
PROMPT_TOKENS = 16
_ARENA_BYTES = 1 << 40
_REPORT_S = 1.0
_TIMEOUT_S = 60.0
_WORD = 70
_HIDDEN_SIZE = 128
"""Of the demo model, for which the router plans items; it refuses tickets of another form."""


def _tensors(tokens: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec(EMBEDS, DType.F32, (tokens, _HIDDEN_SIZE)),)


class FixedLengthEngine(FakeTextEngine):
    """Answers of the maximum length, with one token per running sequence every ``step_s``."""

    def add(self, request: EngineRequest) -> None:
        super().add(request)
        for sequence in self._waiting[request.request_id]:
            sequence.length = sequence.limit

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        return tuple(tensors) == _tensors(tokens)

    def step(self) -> list[EngineOutput]:
        time.sleep(self.step_s)
        return super().step()


class TicketPrinter(NoLoras):
    """``ports.Encoder`` that answers at once."""

    def __init__(self, instance_id: str) -> None:
        self._info = InstanceInfo(instance_id, 1, Role.E, FAKE_MODEL, _ARENA_BYTES, (), "fake-1")

    async def describe(self) -> InstanceInfo:
        return self._info

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        tensors = _tensors(request.tokens)
        ticket = Ticket(
            key=request.info.digest,
            holder=self._info.instance_id,
            epoch=1,
            offset=0,
            payload_nbytes=payload_nbytes(tensors),
            generation=1,
            checksum=1,
            tensors=tensors,
            tokens=request.tokens,
            lease_id=request.reader_lease,
            lease_s=request.lease_s,
        )
        return EncodeResult(ticket, request.router_lease, cached=False, queue_s=0.0, encode_s=0.0)

    async def lease(self, request: LeaseRequest) -> Ticket:
        raise AssertionError(f"no lease runs out here, {request.lease_s} s were asked for")

    async def release(self, lease_ids: Sequence[LeaseId]) -> None: ...

    async def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        while True:
            yield InstanceLoad({Stage.ENCODE: StageLoad(0, 0)})
            await asyncio.sleep(_REPORT_S)


async def _acquire_nothing(
    self: TensorReceiver, job_id: str, placements: Sequence[Placement], queue_position: QueuePosition
) -> Arrived:
    """In place of ``TensorReceiver.acquire``: the tickets are made up."""
    del self, job_id, placements, queue_position
    return Arrived((), ())


def _nobody(address: str) -> HolderStub:
    raise TransferFailed(address)


class Relay(router_pb2_grpc.RouterServicer):
    """A router that only forwards."""

    def __init__(self, encoders: Sequence[Any], text: Any) -> None:
        self._encoders = encoders
        self._text = text

    async def Chat(self, request: router_pb2.ChatRequest, context: Any) -> AsyncGenerator[router_pb2.ChatEvents]:  # noqa: N802
        del context
        parts = [part for message in request.messages for part in message.parts]
        media = [part.media.data for part in parts if part.WhichOneof("part") == "media"]
        encoded = await asyncio.gather(*(self._encode(request, item, data) for item, data in enumerate(media)))
        work = text_pb2.TextRequest(
            request_id=request.request_id,
            model=request.model,
            token_ids=[FAKE_PLACEHOLDER_ID] * IMAGE_TOKENS * len(media) + [_WORD] * PROMPT_TOKENS,
            placements=[
                text_pb2.Placement(item=item, start=item * IMAGE_TOKENS, ticket=embedding.ticket)
                for item, embedding in enumerate(encoded)
            ],
            sampling=request.sampling,
        )
        async for ready in self._text.Generate(work, timeout=_TIMEOUT_S):
            passed_on = router_pb2.ChatEvents()
            for event in ready.events:
                kind = event.WhichOneof("event")
                if kind == "chunk":
                    passed_on.events.add(chunk=event.chunk)
                elif kind == "finished":
                    passed_on.events.add(choice_finished=router_pb2.ChoiceFinished(reason=event.finished.reason))
                    usage = router_pb2.Usage(completion_tokens=event.finished.completion_tokens)
                    passed_on.events.add(finished=router_pb2.ChatFinished(usage=usage))
            if passed_on.events:
                yield passed_on
        for number, encoder in enumerate(self._encoders):
            leases = [embedding.router_lease for embedding in encoded[number :: len(self._encoders)]]
            if leases:
                await encoder.Release(encoder_pb2.ReleaseRequest(lease_ids=leases), timeout=_TIMEOUT_S)

    async def _encode(self, request: router_pb2.ChatRequest, item: int, media: bytes) -> encoder_pb2.EncodeResponse:
        encoder = self._encoders[item % len(self._encoders)]
        message = encode_message(request.request_id, item, media)
        answer: encoder_pb2.EncodeResponse = await encoder.Encode(message, timeout=_TIMEOUT_S)
        return answer


def encode_message(request_id: str, item: int, media: bytes) -> encoder_pb2.EncodeRequest:
    """The request that a router would send, with a made-up digest."""
    return encoder_pb2.EncodeRequest(
        request_id=request_id,
        item=item,
        model=FAKE_MODEL.model_id,
        media=media,
        info=common_pb2.MediaInfo(
            modality=common_pb2.MODALITY_IMAGE, format="png", width=56, height=56, nbytes=len(media), digest=bytes(32)
        ),
        tokens=IMAGE_TOKENS,
        lease_s=_TIMEOUT_S,
        reader_lease=secrets.token_bytes(16),
        router_lease=secrets.token_bytes(16),
    )


@dataclass(frozen=True, slots=True)
class Secured:
    tls: TlsIdentity
    encoder_ports: Sequence[int]
    text_port: int


async def serve_peers(
    encoder_ports: Sequence[int],
    text_port: int,
    step_s: float,
    stream_interval_s: float,
    secured: Secured | None = None,
) -> None:
    """``secured`` are further ports of the same peers, under mutual TLS."""
    async with AsyncExitStack() as stack:
        for number, port in enumerate(encoder_ports, start=1):
            encoder = TicketPrinter(f"encoder-{number}")
            servicers = (EncoderServicer(encoder), InstanceServicer(encoder))
            await stack.enter_async_context(_server(port, *servicers))
            if secured is not None:
                also = secured.encoder_ports[number - 1]
                await stack.enter_async_context(_server(also, *servicers, tls=secured.tls))
        files = ModelFiles.load(MODEL_DIR)
        tokenizer = Tokenizer.load(files)
        # The router builds the demo model's prompts, the relay and the direct client those of the fake model.
        placeholder_ids = frozenset({FAKE_PLACEHOLDER_ID, *written_family(files).placeholder_ids})
        world = await stack.enter_async_context(real_world("peers", "text-1", 1))
        engine = FixedLengthEngine(range(60, 90), max_running=256, step_s=step_s, placeholder_ids=placeholder_ids)
        stages = frozenset({Stage.PREFILL, Stage.DECODE})
        part = ServedPart(ProfileIdentity(ModelPart.DECODER, "0" * 64, stages, "fake", FAKE_MODEL.dtype), 256)
        loaded = LoadedText(
            engine,
            part,
            world.threads(1, name="engine"),
            partial(IncrementalDetokenizer, tokenizer),
            Grammars(tokenizer).start,
        )
        settings = TextSettings(model=Path(), stream_interval_s=stream_interval_s, kv_arena_bytes=0)
        data_plane = MemoryDataPlane(MemoryNetwork(), _nobody)
        setattr(TensorReceiver, "acquire", _acquire_nothing)  # noqa: B010 - for the type checker
        text = (await stack.enter_async_context(build(settings, world, data_plane, loaded))).text
        await stack.enter_async_context(_server(text_port, TextServicer(text), InstanceServicer(text)))
        if secured is not None:
            servers = (TextServicer(text), InstanceServicer(text))
            await stack.enter_async_context(_server(secured.text_port, *servers, tls=secured.tls))
        await asyncio.Event().wait()


async def serve_relay(port: int, encoder_ports: Sequence[int], text_port: int) -> None:
    def channel(to: int) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"{HOST}:{to}", options=limits.channel_options())

    encoders = [encoder_pb2_grpc.EncoderStub(channel(to)) for to in encoder_ports]
    server = grpc.aio.server(options=limits.server_options(MAX_MESSAGE_NBYTES))
    router_pb2_grpc.add_RouterServicer_to_server(Relay(encoders, text_pb2_grpc.TextStub(channel(text_port))), server)
    server.add_insecure_port(f"{HOST}:{port}")
    await server.start()
    await server.wait_for_termination()


async def serve_collector(port: int) -> None:
    """An OTLP collector that reads what it gets and keeps nothing."""

    async def export(request: bytes, context: Any) -> bytes:
        del request, context
        return b""

    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    handlers: dict[str, Any] = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server = grpc.aio.server(options=limits.server_options(MAX_MESSAGE_NBYTES))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"{HOST}:{port}")
    await server.start()
    await server.wait_for_termination()


def _server(port: int, *servicers: Any, tls: TlsIdentity | None = None) -> RpcServer:
    def register(server: grpc.aio.Server) -> None:
        for servicer in servicers:
            servicer.register(server)

    return RpcServer(host=HOST, port=port, service_names=(), register=register, tls=tls)


def main() -> None:
    """``peers TEXT_PORT ENCODER_PORTS STEP_S STREAM_INTERVAL_S [FOLDER TEXT_PORT ENCODER_PORTS]``,
    ``relay PORT TEXT_PORT ENCODER_PORTS``, or ``collector PORT``.
    """
    kind, *rest = sys.argv[1:]
    if kind == "peers":
        text_port, encoders, step_s, interval_s, *more = rest
        secured = None
        if more:
            folder, text, others = more
            secured = Secured(identity.loaded(Path(folder)), _ports(others), int(text))
        uvloop.run(serve_peers(_ports(encoders), int(text_port), float(step_s), float(interval_s), secured))
    elif kind == "collector":
        uvloop.run(serve_collector(int(rest[0])))
    else:
        port, text_port, encoders = rest
        uvloop.run(serve_relay(int(port), _ports(encoders), int(text_port)))


def _ports(text: str) -> list[int]:
    return [int(port) for port in text.split(",")]


if __name__ == "__main__":
    main()
