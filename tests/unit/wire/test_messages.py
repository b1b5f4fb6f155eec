"""Round trips of everything on the wire; malformed messages are refused."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych import errors
from triptych.domain.chat import ChatRequest, MediaPart, Message, TextPart, Tokenized, ToolCall, ToolChoice
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.decision import (
    Acting,
    Bounds,
    DecisionOutcome,
    DecisionSummary,
    Override,
    PoolLoad,
    PoolState,
    Reason,
    ScalingStatus,
    Why,
)
from triptych.domain.embedding import DType, TensorSpec, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.generation import (
    Alternative,
    ChatFinished,
    ChoiceFinished,
    Finished,
    FinishReason,
    Placement,
    PullReport,
    Ready,
    TextRequest,
    TokenChunk,
    TokenLogprobs,
    ToolArguments,
    ToolCallMade,
    Usage,
)
from triptych.domain.instance import InstanceInfo, InstanceLoad, ModelInfo, ServedPart, StageLoad, TransportOffer
from triptych.domain.media import MediaInfo, Modality, Shard
from triptych.domain.membership import Member, MemberKind, MemberState
from triptych.domain.pool import (
    Departure,
    Farewell,
    Heartbeat,
    ManagerStatus,
    ManualSize,
    MemberCondition,
    MemberReport,
    MembershipDelta,
    MemberStatus,
    Order,
    OrderKind,
    PoolStatus,
    Registration,
    Removal,
    Watch,
)
from triptych.domain.profile import ProfileIdentity
from triptych.domain.queue_position import RelativeQueuePosition
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.domain.sampling import Grammar, ResponseFormat, SamplingParams
from triptych.domain.scaling import PoolName, ProcessPhase, ScaledInstance, ScaledPool
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.domain.timeline import ItemTimeline, Outcome, Readiness, Timeline
from triptych.domain.windows import ClassWindow, Judged, NamedClass, NamedInstance, Refusals, Sketch, WindowReport
from triptych.v1 import instance_pb2, pool_manager_pb2, router_pb2, scaler_pb2, text_pb2
from triptych.wire import common, encoder, instance, pool_manager, router, scaler, text

U32 = st.integers(0, 2**32 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
SMALL = st.integers(1, 2**20)
U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(max_size=20)
SECONDS = st.floats(0, 1e6)
LEFT_S = st.floats(-1e6, 1e6)
KEY = st.binary(min_size=32, max_size=32)
LEASE = st.binary(min_size=16, max_size=16)
INFO = st.builds(
    MediaInfo,
    modality=st.sampled_from(Modality),
    format=TEXT,
    width=U32,
    height=U32,
    nbytes=U64,
    digest=KEY,
    options=st.dictionaries(TEXT, TEXT, max_size=3).map(lambda options: tuple(sorted(options.items()))),
    frames=U32,
    duration_s=SECONDS,
    samples=U64,
    sample_rate_hz=U32,
    rotation_deg=st.sampled_from((0, 90, 180, 270)),
)
SHARD = st.builds(
    lambda first, count, rest: Shard(first, count, first + count + rest), SMALL, SMALL, st.integers(0, 99)
)
SPEC = st.builds(TensorSpec, TEXT, st.sampled_from(DType), st.lists(U32, max_size=4).map(tuple))
TICKET = st.builds(
    Ticket,
    key=KEY,
    holder=TEXT,
    epoch=U64,
    offset=U32,
    payload_nbytes=U32,
    generation=U64,
    checksum=U64,
    tensors=st.lists(SPEC, max_size=3).map(tuple),
    tokens=SMALL,
    lease_id=LEASE,
    lease_s=SECONDS,
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=SECONDS,
    top_p=SECONDS,
    top_k=st.integers(-(2**31), 2**31 - 1),
    min_p=SECONDS,
    seed=st.none() | I64,
    n=U32,
    max_tokens=st.none() | U32,
    min_tokens=U32,
    stop=st.lists(TEXT, max_size=3).map(tuple),
    stop_token_ids=st.lists(U32, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    repetition_penalty=SECONDS,
    frequency_penalty=SECONDS,
    presence_penalty=SECONDS,
    logit_bias=st.lists(st.tuples(U32, st.floats(-100, 100)), max_size=3).map(tuple),
    logprobs=st.none() | U32,
    response_format=st.none() | st.builds(ResponseFormat, st.sampled_from(Grammar), TEXT),
)
MODEL = st.builds(
    ModelInfo, model_id=TEXT, revision=TEXT, dtype=st.sampled_from(DType), hidden_size=U32, context_length=U32
)
OFFERS = st.lists(st.builds(TransportOffer, TEXT, TEXT, st.binary(max_size=8)), max_size=3).map(tuple)
PARTS = st.lists(
    st.builds(
        ServedPart,
        st.builds(
            ProfileIdentity,
            st.sampled_from(ModelPart),
            TEXT,
            st.sets(st.sampled_from(Stage)).map(frozenset),
            TEXT,
            st.sampled_from(DType),
            U32,
            TEXT,
            st.dictionaries(TEXT, TEXT, max_size=3),
        ),
        U32,
        U32,
        U32,
    ),
    max_size=2,
).map(tuple)
INSTANCE = st.builds(
    InstanceInfo,
    instance_id=TEXT,
    epoch=U64,
    role=st.sampled_from(Role),
    model=MODEL,
    arena_bytes=U64,
    offers=OFFERS,
    encoder_version=TEXT,
    max_items=st.integers(0, 2**32 - 1),
    kv_tokens=U64,
    parts=PARTS,
    continues=st.booleans(),
    prefills_early=st.booleans(),
)
ALTERNATIVE = st.builds(Alternative, U32, st.binary(max_size=4), st.floats(-1e6, 0) | st.just(float("-inf")))
LOGPROBS = st.lists(st.builds(TokenLogprobs, ALTERNATIVE, st.lists(ALTERNATIVE, max_size=3).map(tuple)), max_size=3)
CHUNK = st.builds(TokenChunk, st.lists(U32, max_size=4).map(tuple), TEXT, U32, LOGPROBS.map(tuple))
PULLS = st.lists(st.builds(PullReport, U32, TEXT, U64, SECONDS, st.booleans()), max_size=3).map(tuple)
FINISHED = st.builds(Finished, st.sampled_from(FinishReason), U32, SECONDS, SECONDS, U32, U32, SECONDS)
TEXT_EVENT = CHUNK | FINISHED | st.builds(Ready, PULLS, SECONDS, SECONDS)
CHOICE_FINISHED = st.builds(ChoiceFinished, st.sampled_from(FinishReason), U32)
TOOL_CALL = st.builds(ToolCall, TEXT, TEXT, TEXT)
CHAT_EVENT = (
    CHUNK
    | st.builds(ToolCallMade, TOOL_CALL, U32, U32)
    | st.builds(ToolArguments, TEXT, U32, U32)
    | CHOICE_FINISHED
    | st.builds(ChatFinished, st.builds(Usage, U32, U32, U32))
)
MEDIA_PART = st.builds(MediaPart, st.sampled_from(Modality), st.binary(max_size=8))
PART = st.builds(TextPart, TEXT) | MEDIA_PART
MESSAGE = st.builds(
    Message,
    st.sampled_from(("system", "user", "assistant", "tool")),
    st.lists(PART, max_size=3).map(tuple),
    st.lists(TOOL_CALL, max_size=2).map(tuple),
    TEXT,
)
CONTINUED = st.lists(st.builds(ContinuedChoice, U32, st.lists(U32, max_size=4).map(tuple)), max_size=3).map(tuple)
CHAT = st.builds(
    ChatRequest,
    request_id=TEXT,
    model=TEXT,
    messages=st.lists(MESSAGE, max_size=3).map(tuple),
    sampling=SAMPLING,
    timeout_s=st.just(9.0),
    tenant_salt=st.binary(max_size=8),
    prompt=st.none() | TEXT,
    tools=TEXT,
    tool_choice=st.builds(ToolChoice, st.booleans(), TEXT, st.booleans()),
    priority=I64,
    continued=CONTINUED,
)
POSITION = st.builds(RelativeQueuePosition, st.none() | LEFT_S, st.none() | LEFT_S, st.none() | LEFT_S, LEFT_S)
TEXT_REQUEST = st.builds(
    TextRequest,
    request_id=TEXT,
    model=TEXT,
    token_ids=st.lists(U32, max_size=9).map(tuple),
    placements=st.lists(st.builds(Placement, U32, U32, TICKET, st.booleans()), max_size=2).map(tuple),
    sampling=SAMPLING,
    timeout_s=st.just(9.0),
    priority=I64,
    position=POSITION,
    continued=CONTINUED,
)
ENCODE = st.builds(
    EncodeRequest,
    request_id=TEXT,
    item=U32,
    model=TEXT,
    media=st.binary(max_size=8),
    info=INFO,
    tokens=U32,
    tenant_salt=st.binary(max_size=8),
    timeout_s=st.just(9.0),
    lease_s=SECONDS,
    reader_lease=LEASE,
    router_lease=LEASE,
    shard=st.none() | SHARD,
    position=POSITION,
)
ITEM_TIMELINE = st.builds(
    ItemTimeline, item=U32, modality=TEXT, width=U32, height=U32, tokens=U32, encoder=TEXT, pull_bytes=U64, shard=TEXT
)
TIMELINE = st.builds(
    Timeline,
    request_id=TEXT,
    model=TEXT,
    outcome=st.sampled_from(Outcome),
    items=st.lists(ITEM_TIMELINE, max_size=3).map(tuple),
    text_instance=TEXT,
    continuations=U32,
    interrupted_s=SECONDS,
    continued_tokens=U32,
    preemptions=U32,
    preempted_s=SECONDS,
    ttft_s=SECONDS,
    error=TEXT,
)
STRINGS = st.lists(TEXT, max_size=3).map(tuple)

ROUND_TRIPS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "media info": (INFO, common.MEDIA_INFO.to_wire, common.MEDIA_INFO.from_wire),
    "ticket": (TICKET, common.TICKET.to_wire, common.TICKET.from_wire),
    "sampling": (SAMPLING, common.SAMPLING.to_wire, common.SAMPLING.from_wire),
    "model": (MODEL, common.MODEL.to_wire, common.MODEL.from_wire),
    "instance": (INSTANCE, instance.INSTANCE.to_wire, instance.INSTANCE.from_wire),
    "encode request": (ENCODE, encoder.ENCODE_REQUEST.to_wire, lambda m: encoder.ENCODE_REQUEST.from_wire(m, 9.0)),
    "encode result": (
        st.builds(EncodeResult, TICKET, LEASE, st.booleans(), SECONDS, SECONDS),
        encoder.ENCODE_RESULT.to_wire,
        encoder.encode_result_from_wire,
    ),
    "lease request": (
        st.builds(LeaseRequest, KEY, st.none() | st.integers(1, 2**64 - 1), LEASE, SECONDS, st.just(9.0)),
        encoder.LEASE_REQUEST.to_wire,
        lambda m: encoder.LEASE_REQUEST.from_wire(m, 9.0),
    ),
    "load": (
        st.builds(
            InstanceLoad,
            st.dictionaries(st.sampled_from(Stage), st.builds(StageLoad, U64, U32, U64)),
            st.booleans(),
        ),
        instance.LOAD.to_wire,
        instance.LOAD.from_wire,
    ),
    "text request": (TEXT_REQUEST, text.TEXT_REQUEST.to_wire, lambda m: text.TEXT_REQUEST.from_wire(m, 9.0)),
    "text events": (st.lists(TEXT_EVENT).map(tuple), text.text_events_to_wire, text.text_events_from_wire),
    "chat request": (CHAT, router.chat_request_to_wire, lambda m: router.chat_request_from_wire(m, 9.0)),
    "resolve request": (
        st.builds(
            ResolveRequest,
            request_id=TEXT,
            model=TEXT,
            media=st.lists(MEDIA_PART, max_size=3).map(tuple),
            keys=st.lists(KEY, max_size=3).map(tuple),
            timeout_s=st.just(9.0),
            tenant_salt=st.binary(max_size=8),
            priority=st.integers(-(2**31), 2**31 - 1),
        ),
        router.resolve_request_to_wire,
        lambda m: router.resolve_request_from_wire(m, 9.0),
    ),
    "resolved items": (
        st.lists(
            st.builds(ResolvedItem, TICKET, st.booleans(), st.lists(st.integers(0, 4096), max_size=3).map(tuple))
        ).map(tuple),
        router.resolved_to_wire,
        router.resolved_from_wire,
    ),
    "chat events": (st.lists(CHAT_EVENT).map(tuple), router.chat_events_to_wire, router.chat_events_from_wire),
    "timeline": (TIMELINE, router.TIMELINE.to_wire, router.TIMELINE.from_wire),
    "readiness": (
        st.builds(Readiness, st.booleans(), STRINGS, STRINGS),
        router.READINESS.to_wire,
        router.READINESS.from_wire,
    ),
    "tokenized": (
        st.builds(Tokenized, st.lists(U32, max_size=9).map(tuple), STRINGS),
        router.TOKENIZED.to_wire,
        router.TOKENIZED.from_wire,
    ),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_messages_survive_a_round_trip(name: str) -> None:
    values, to_wire, from_wire = ROUND_TRIPS[name]

    @given(values)
    def round_trip(value: Any) -> None:
        message = to_wire(value)
        assert from_wire(type(message).FromString(message.SerializeToString())) == value

    round_trip()


def test_an_event_of_an_unknown_kind_is_an_internal_error() -> None:
    with pytest.raises(errors.InternalError):
        text.text_events_from_wire(text_pb2.TextEvents(events=[text_pb2.TextEvent()]))
    with pytest.raises(errors.InternalError):
        router.chat_events_from_wire(router_pb2.ChatEvents(events=[router_pb2.ChatEvent()]))


def test_a_load_report_with_a_stage_twice_is_refused() -> None:
    stage = instance_pb2.StageLoad(stage=instance_pb2.STAGE_DECODE, pending=1)
    with pytest.raises(errors.InvalidRequest, match="names a stage twice"):
        instance.LOAD.from_wire(instance_pb2.InstanceLoad(stages=[stage, stage]))


ROLES, KINDS = st.none() | st.sampled_from(Role), st.sampled_from(MemberKind)
LOADS = st.builds(
    InstanceLoad, st.dictionaries(st.sampled_from(Stage), st.builds(StageLoad, U32, U32, U32)), st.booleans()
)
REGISTRATION = st.builds(
    Registration,
    KINDS,
    TEXT,
    U64,
    TEXT,
    TEXT,
    TEXT,
    ROLES,
    U32,
    U32,
    U32,
    st.lists(TEXT, max_size=3).map(tuple),
    PARTS,
    st.lists(TEXT, max_size=3).map(tuple),
)
ADDRESS = st.integers(1, 65535).map(lambda port: f"host:{port}")
MEMBER = st.builds(
    Member,
    ADDRESS,
    st.sampled_from(MemberState),
    ROLES,
    st.none() | TEXT,
    st.none() | U64,
    KINDS,
    st.booleans(),
)
DELTA = st.builds(
    MembershipDelta,
    U64,
    U64,
    st.booleans(),
    st.lists(MEMBER, max_size=3).map(tuple),
    st.lists(st.builds(Removal, TEXT, st.sampled_from(Departure)), max_size=3).map(tuple),
)
MEMBER_STATUS = st.builds(
    MemberStatus, REGISTRATION, st.sampled_from(MemberCondition), st.booleans(), LOADS, SECONDS, SECONDS
)
JUDGED = st.builds(Judged, U32, U32)
DECISION = st.builds(
    DecisionSummary,
    U64,
    SECONDS,
    U32,
    U32,
    st.lists(st.builds(Reason, st.sampled_from(Why), TEXT), max_size=2).map(tuple),
    TEXT,
    TEXT,
    st.lists(TEXT, max_size=2).map(tuple),
    U32,
    U32,
    U32,
    st.none() | st.builds(PoolLoad, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS),
    st.none() | SECONDS,
    st.none() | U32,
    JUDGED,
    st.none() | SECONDS,
    st.sampled_from(DecisionOutcome),
    TEXT,
)
SCALING = st.builds(
    ScalingStatus,
    TEXT,
    st.sampled_from(PoolState),
    st.sampled_from(Acting),
    U32,
    U32,
    U32,
    U32,
    st.builds(Bounds, U32, U32),
    JUDGED,
    st.none() | st.builds(Override, U32, SECONDS),
    TEXT,
    st.lists(DECISION, max_size=2).map(tuple),
    st.lists(TEXT, max_size=2).map(tuple),
)
POOL_STATUS = st.builds(PoolStatus, TEXT, ROLES, st.lists(MEMBER_STATUS, max_size=2).map(tuple), st.none() | SCALING)


SKETCH = st.builds(Sketch, st.integers(0, 95), st.lists(U32, max_size=4).map(tuple))
CLASS = st.builds(
    ClassWindow, arrivals=U32, missed_encode=U32, ttft=JUDGED, tbt=JUDGED, e2e=JUDGED, ttft_s=SKETCH, tbt_s=SKETCH
)
WINDOW = st.builds(
    WindowReport,
    U64,
    U32,
    SECONDS,
    SECONDS,
    TEXT,
    st.lists(st.builds(NamedClass, TEXT, CLASS), max_size=2).map(tuple),
    st.lists(st.builds(NamedInstance, TEXT, JUDGED), max_size=2).map(tuple),
    st.builds(Refusals, U32, U32),
    U32,
    U32,
    U32,
)


@given(REGISTRATION | st.builds(Heartbeat, U64, LOADS, st.booleans()) | st.builds(Farewell, TEXT) | WINDOW)
def test_member_reports_round_trip(report: MemberReport) -> None:
    assert pool_manager.report_from_wire(pool_manager.report_to_wire(report)) == report


@given(
    DELTA,
    st.builds(Order, st.sampled_from(OrderKind), TEXT),
    st.builds(Watch, U64, U64, TEXT, st.lists(KINDS, max_size=2).map(tuple)),
    st.builds(
        ManagerStatus,
        U64,
        U64,
        SECONDS,
        U32,
        st.lists(POOL_STATUS, max_size=2).map(tuple),
        st.booleans(),
        TEXT,
        TEXT,
    ),
    st.builds(ManualSize, TEXT, st.sampled_from(Role), st.none() | U32, SECONDS),
)
def test_deltas_orders_watches_status_and_sizes_round_trip(
    delta: MembershipDelta, order: Order, watch: Watch, status: ManagerStatus, size: ManualSize
) -> None:
    assert pool_manager.MANUAL_SIZE.from_wire(pool_manager.MANUAL_SIZE.to_wire(size)) == size
    assert pool_manager.delta_from_wire(pool_manager.DELTA.to_wire(delta)) == delta
    assert pool_manager.ORDER.from_wire(pool_manager.ORDER.to_wire(order)) == order
    assert pool_manager.WATCH.from_wire(pool_manager.WATCH.to_wire(watch)) == watch
    assert pool_manager.STATUS.from_wire(pool_manager.STATUS.to_wire(status)) == status


def test_an_empty_report_and_a_delta_with_invalid_members_are_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="empty"):
        pool_manager.report_from_wire(pool_manager_pb2.MemberReport())
    many = MembershipDelta(1, 1, removed=(Removal("a:1", Departure.LEFT),) * 5000)
    with pytest.raises(errors.InvalidRequest, match="more than 4096"):
        pool_manager.delta_from_wire(pool_manager.DELTA.to_wire(many))
    with pytest.raises(errors.InvalidRequest, match="address"):
        pool_manager.delta_from_wire(pool_manager.DELTA.to_wire(MembershipDelta(1, 1, members=(Member("/etc"),))))


POOL = st.builds(PoolName, TEXT, st.sampled_from(Role))
SCALED = st.builds(
    ScaledPool,
    POOL,
    st.none() | st.integers(0, 4096),
    st.lists(st.builds(ScaledInstance, TEXT, st.sampled_from(ProcessPhase), TEXT), max_size=3).map(tuple),
    TEXT,
)


@given(POOL, st.integers(0, 4096), TEXT, U64, st.lists(SCALED, max_size=3, unique_by=lambda pool: pool.name).map(tuple))
def test_what_managers_and_scalers_exchange_survives_the_wire(
    pool: PoolName, size: int, instance_id: str, token: int, pools: tuple[ScaledPool, ...]
) -> None:
    assert scaler.scale_from_wire(scaler.scale_to_wire(pool, size, token)) == (pool, size, token)
    assert scaler.remove_from_wire(scaler.remove_to_wire(pool, instance_id, token)) == (pool, instance_id, token)
    assert scaler.pools_from_wire(scaler.pools_to_wire(pools)) == pools


def test_an_order_without_a_pool_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="role is not set"):
        scaler.scale_from_wire(scaler_pb2.ScaleRequest(size=1))
