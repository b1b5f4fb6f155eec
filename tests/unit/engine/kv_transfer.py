"""Hands requests from one text engine to another, as two instances do (docs/adr/0044), without an arena between them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from triptych.domain.continuation import ContinuedChoice
from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.domain.kv_segment import KvSegment
from triptych.ports import KvAccess, TextEngine

Packed = list[tuple[KvSegment, bytearray]]
"""Segments in order, and their contents."""
CUT = 24
"""Positions of a segment: of no block size, so that segments begin and end within blocks."""
_MOST_STEPS = 2000


def access(engine: TextEngine) -> KvAccess:
    assert engine.kv is not None
    return engine.kv


def prefill(source: TextEngine, request: EngineRequest) -> tuple[list[EngineOutput], Packed]:
    """Compute a prompt and the first token of each choice; segments are packed as soon as they are computed.

    Returns all that the engine gave meanwhile, also for other requests.
    """
    name, first = request.request_id, min(request.begun)
    source.add(replace(_forked(request), pauses=True))
    outputs: list[EngineOutput] = []
    packed: Packed = []
    for _ in range(_MOST_STEPS):
        outputs += source.step()
        _pack(source, name, first, packed, most=len(request.token_ids))
        if {output.choice for output in outputs if output.request_id == name} == set(request.begun):
            source.cancel(name)
            return outputs, packed
    raise AssertionError(f"{name} has no first token")


def go_on(
    target: TextEngine,
    request: EngineRequest,
    begun: Mapping[int, Sequence[int]],
    packed: Mapping[int, Packed],
    *,
    lost: Collection[int] = (),
) -> list[EngineOutput]:
    """Begin the rest of an answer from the segments of each choice, but for ``lost`` ones. Returns what the engine gave meanwhile."""
    name, kv = request.request_id, access(target)
    continued = tuple(ContinuedChoice(choice, tuple(tokens)) for choice, tokens in sorted(begun.items()))
    arriving = max(segments[-1][0].end for segments in packed.values())
    target.add(replace(_forked(request), continued=continued, arriving=arriving))
    outputs: list[EngineOutput] = []
    for _ in range(_MOST_STEPS):
        outputs += target.step()
        for choice in sorted(choice for whose, choice in kv.awaiting if whose == name):
            for index, (segment, memory) in enumerate(packed[choice]):
                if index not in lost:
                    kv.unpack(name, choice, segment, memoryview(memory))
        if name not in target.waiting:
            kv.arrived(name)
            return outputs
    raise AssertionError(f"{name} does not begin")


def transfer_kv(
    source: TextEngine,
    request: EngineRequest,
    target: TextEngine,
    begun: Mapping[int, Sequence[int]],
    *,
    lost: Collection[int] = (),
    harm: bool = False,
) -> list[EngineOutput]:
    """The target goes on with a running request of the source, after these tokens. ``harm`` loses the keys on the way."""
    name = request.request_id
    kv = access(source)
    kv.pause(name)
    packed: dict[int, Packed] = {choice: [] for choice in begun}
    for choice, segments in packed.items():
        _pack(source, name, choice, segments, most=kv.computed(name, choice))
        for _, memory in segments if harm else ():
            memory[: len(memory) // 2] = bytes(len(memory) // 2)
    source.cancel(name)
    return go_on(target, request, begun, packed, lost=lost)


def _pack(source: TextEngine, name: str, choice: int, packed: Packed, *, most: int) -> None:
    """Pack what is computed of the first ``most`` positions, and not packed; if segments are whole, only all of them."""
    kv = access(source)
    computed = min(kv.computed(name, choice), most)
    if kv.kind.is_whole:
        for segment in kv.kind.segments(0, most) if computed == most and not packed else ():
            packed.append((segment, bytearray(segment.nbytes)))
            assert kv.pack(name, choice, segment, memoryview(packed[-1][1]))
        return
    while (first := packed[-1][0].end if packed else 0) < computed:
        segment = KvSegment(kv.kind, first, min(CUT, most - first))
        memory = bytearray(segment.nbytes)
        if segment.end > computed:
            assert not kv.pack(name, choice, segment, memoryview(memory)), "it is not computed"
            return
        assert kv.pack(name, choice, segment, memoryview(memory))
        packed.append((segment, memory))


def _forked(request: EngineRequest) -> EngineRequest:
    return replace(request, grammar=None if request.grammar is None else request.grammar.fork())
