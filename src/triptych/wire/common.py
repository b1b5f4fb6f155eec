"""Messages that several services share: items, tickets, sampling parameters, models, token chunks."""

from triptych.domain.continuation import ContinuedChoice
from triptych.domain.embedding import TensorSpec, Ticket
from triptych.domain.generation import Alternative, TokenChunk, TokenLogprobs
from triptych.domain.instance import ModelInfo
from triptych.domain.lora import LoadedLora, LoadLora
from triptych.domain.media import MediaInfo, Shard
from triptych.domain.queue_position import RelativeQueuePosition
from triptych.domain.sampling import ResponseFormat, SamplingParams
from triptych.v1 import common_pb2
from triptych.wire.bounds import checker
from triptych.wire.flat import Pair

MEDIA_INFO = Pair(
    MediaInfo,
    common_pb2.MediaInfo,
    special={"options": (lambda info: dict(info.options), lambda message: tuple(sorted(message.options.items())))},
)
SHARD = Pair(Shard, common_pb2.Shard)
POSITION = Pair(RelativeQueuePosition, common_pb2.RelativeQueuePosition)
TICKET = Pair(Ticket, common_pb2.Ticket, nested=(Pair(TensorSpec, common_pb2.TensorSpec),))
check_ticket = checker(common_pb2.Ticket.DESCRIPTOR)
"""Raises InvalidRequest for an invalid ticket in an answer; those in requests are checked with them."""
SAMPLING = Pair(
    SamplingParams,
    common_pb2.SamplingParams,
    nested=(Pair(ResponseFormat, common_pb2.ResponseFormat),),
    special={
        "logit_bias": (
            lambda params: [common_pb2.LogitBias(token_id=token, bias=bias) for token, bias in params.logit_bias],
            lambda message: tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        )
    },
)
CONTINUED = Pair(ContinuedChoice, common_pb2.ContinuedChoice)
MODEL = Pair(ModelInfo, common_pb2.ModelInfo)
LORA = Pair(LoadedLora, common_pb2.LoadedLora, check=checker(common_pb2.LoadedLora.DESCRIPTOR))
LOAD_LORA = Pair(LoadLora, common_pb2.LoadLoraRequest)
_LOGPROBS = Pair(TokenLogprobs, common_pb2.TokenLogprobs, nested=(Pair(Alternative, common_pb2.Alternative),))
CHUNK = Pair(TokenChunk, common_pb2.TokenChunk, nested=(_LOGPROBS,))
