"""Conversion of instance descriptions and load reports."""

from collections.abc import Mapping

from triptych.domain.embedding_hints import EmbeddingHints
from triptych.domain.instance import (
    ClosedStage,
    InstanceInfo,
    InstanceLimits,
    InstanceLoad,
    LimitsReport,
    ServedPart,
    StageLoad,
    TransportOffer,
)
from triptych.domain.profile import ProfileIdentity
from triptych.domain.stage import Stage
from triptych.errors import InvalidRequest
from triptych.v1 import instance_pb2
from triptych.wire.bounds import checker
from triptych.wire.common import LORA, MODEL
from triptych.wire.flat import EnumPair, Pair

_STAGE = EnumPair.of(Stage.__members__, instance_pb2.Stage.DESCRIPTOR)


def _stages_to_wire(load: InstanceLoad) -> list[instance_pb2.StageLoad]:
    stages: list[instance_pb2.StageLoad] = []
    for stage, stage_load in load.stages.items():
        stage_message = instance_pb2.StageLoad(
            stage=_STAGE.to_wire[stage],
            pending_tokens=stage_load.pending_tokens,
            pending=stage_load.pending,
            leased_bytes=stage_load.leased_bytes,
            free_tokens=stage_load.free_tokens,
            served=stage_load.served,
        )
        stages.append(stage_message)
    return stages


def _stages_from_wire(message: instance_pb2.InstanceLoad) -> Mapping[Stage, StageLoad]:
    stages: dict[Stage, StageLoad] = {}
    for stage_load in message.stages:
        free_tokens = stage_load.free_tokens if stage_load.HasField("free_tokens") else None
        served = stage_load.served if stage_load.HasField("served") else None
        stages[_STAGE.from_wire[stage_load.stage]] = StageLoad(
            stage_load.pending_tokens, stage_load.pending, stage_load.leased_bytes, free_tokens, served
        )
    if len(stages) != len(message.stages):
        raise InvalidRequest("a load report names a stage twice", param="stages")
    return stages


_IDENTITY = Pair(
    ProfileIdentity,
    instance_pb2.PartIdentity,
    special={
        "stages": (
            lambda identity: [_STAGE.to_wire[stage] for stage in Stage if stage in identity.stages],
            lambda message: frozenset(_STAGE.from_wire[stage] for stage in message.stages),
        ),
        "options": (lambda identity: dict(identity.options), lambda message: dict(message.options)),
    },
)
SERVED_PART = Pair(ServedPart, instance_pb2.ServedPart, nested=(_IDENTITY,))
INSTANCE = Pair(
    InstanceInfo,
    instance_pb2.InstanceInfo,
    nested=(MODEL, Pair(TransportOffer, instance_pb2.TransportOffer), SERVED_PART),
)
_HINTS = Pair(EmbeddingHints, instance_pb2.EmbeddingHints, check=checker(instance_pb2.EmbeddingHints.DESCRIPTOR))
LIMITS = Pair(InstanceLimits, instance_pb2.InstanceLimits)
_LIMITS_REPORT = Pair(LimitsReport, instance_pb2.LimitsReport, nested=(LIMITS,))
LOAD = Pair(
    InstanceLoad,
    instance_pb2.InstanceLoad,
    nested=(Pair(ClosedStage, instance_pb2.ClosedStage), _HINTS, _LIMITS_REPORT, LORA),
    special={"stages": (_stages_to_wire, _stages_from_wire)},
)
"""Raises InvalidRequest for an unknown or duplicate stage, and for hints out of bounds."""
