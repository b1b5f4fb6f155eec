"""Hands a running sequence's keys and values from one text engine to another."""

from dataclasses import replace

import torch

from triptych.domain.continuation import ContinuedChoice
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.ports import EngineRequest


def hand_over(
    source: TransformersTextEngine, request: EngineRequest, target: TransformersTextEngine, *, harm: bool = False
) -> list[int]:
    """The target goes on with a request of the source, which cancels it. Returns the tokens that the source gave.

    ``harm`` loses the keys on the way.
    """
    (sequence,) = source._batch.choices(request.request_id)
    assert source._mover is not None
    cache, table = source._mover.cache, source._batch.blocks.table(sequence.sequence_id)
    memory = torch.empty(sequence.computed * cache.kind.position_nbytes, dtype=torch.uint8)
    segment = cache.export(table, 0, sequence.computed, memory)
    assert segment.nbytes == len(memory)
    if harm:
        memory[: segment.nbytes // 2] = 0
    known = list(sequence.answer)
    source.cancel(request.request_id)
    target.add(replace(request, continued=(ContinuedChoice(0, tuple(known)),)))
    (arrived,) = target._batch.choices(request.request_id)
    assert target._mover is not None
    assert target._batch.copies is not None
    arrived.copy = target._batch.copies.take(segment.positions)
    assert arrived.copy is not None
    assert arrived.copy.segment == segment
    target._mover._host[arrived.copy.offset :][: segment.nbytes] = memory
    return known
