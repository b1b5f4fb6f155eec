"""Stored responses: found by their owner alone, within limits of number, bytes and time."""

import pytest

from triptych.domain.chat import MediaPart, Message, TextPart, ToolCall
from triptych.domain.media import Modality
from triptych.errors import InvalidRequest, NotFound
from triptych.services.gateway.response_store import ResponseStore, Stored, StoreLimits, nbytes_of


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def said(role: str, text: str) -> Message:
    return Message("user" if role == "user" else "assistant", (TextPart(text),))


def stored(text: str, previous: str = "", image: bytes = b"") -> Stored:
    parts = (MediaPart(Modality.IMAGE, image),) if image else (TextPart(text),)
    return Stored(b"{}", (Message("user", parts),), said("assistant", f"{text}!"), previous)


def test_a_conversation_has_all_turns_in_order_and_is_its_owners_alone() -> None:
    store = ResponseStore(StoreLimits(), Time())
    for response_id, previous in (("a", ""), ("b", "a"), ("c", "b")):
        assert store.put("alice", response_id, stored(response_id, previous))
    texts = [part.text for message in store.conversation("alice", "c") for part in message.parts]  # type: ignore[union-attr]
    assert texts == ["a", "a!", "b", "b!", "c", "c!"]
    assert store.conversation("alice", "") == ()
    with pytest.raises(NotFound):
        store.get("bob", "c")
    with pytest.raises(NotFound):
        store.delete("bob", "c")
    with pytest.raises(InvalidRequest, match="'c' is not stored"):
        store.conversation("bob", "c")
    store.delete("alice", "a")
    with pytest.raises(InvalidRequest, match="'a' is not stored"):
        store.conversation("alice", "c")
    assert store.get("alice", "c").body == b"{}"


def test_a_response_expires_after_its_last_use() -> None:
    time = Time()
    store = ResponseStore(StoreLimits(stored_response_s=10), time)
    store.put("", "a", stored("a"))
    store.put("", "b", stored("b"))
    time.now_s = 9.0
    store.get("", "a")
    time.now_s = 11.0
    assert store.has("", "a")
    with pytest.raises(NotFound):
        store.get("", "b")
    time.now_s = 100.0
    with pytest.raises(NotFound):
        store.get("", "a")
    assert (store.count, store.nbytes) == (0, 0)


def test_the_key_that_holds_most_makes_room_and_its_oldest_goes_first() -> None:
    one = nbytes_of((*stored("x", image=bytes(1000)).messages, said("assistant", "x!"))) + 2
    store = ResponseStore(StoreLimits(max_stored_bytes=4 * one), Time())
    store.put("bob", "only", stored("x", image=bytes(1000)))
    for number in range(10):
        assert store.put("alice", str(number), stored("x", image=bytes(1000)))
        assert store.nbytes <= 4 * one
    assert store.has("bob", "only")
    assert [number for number in range(10) if store.has("alice", str(number))] == [7, 8, 9]


def test_the_key_with_most_responses_makes_room_where_their_number_is_full() -> None:
    store = ResponseStore(StoreLimits(max_stored_responses=4), Time())
    for name in ("one", "two"):
        assert store.put("bob", name, stored("x", image=bytes(100_000)))
    for number in range(5):
        assert store.put("alice", str(number), stored("x"))
    assert [store.has("bob", name) for name in ("one", "two")] == [True, True]
    assert [number for number in range(5) if store.has("alice", str(number))] == [3, 4]


def test_a_key_that_would_hold_most_with_one_response_evicts_nobody() -> None:
    store = ResponseStore(StoreLimits(max_stored_bytes=200_000), Time())
    for number in range(8):
        assert store.put("bob", str(number), stored("x", image=bytes(10_000)))
    assert not store.put("alice", "large", stored("x", image=bytes(180_000)))
    assert all(store.has("bob", str(number)) for number in range(8))
    assert store.put("alice", "small", stored("x", image=bytes(50_000)))
    assert store.has("alice", "small")


def test_calls_count_with_their_ids_and_what_holds_them() -> None:
    calls = tuple([ToolCall("c" * 256, "f", "{}") for _ in range(1000)])
    assert nbytes_of([Message("assistant", (), calls)]) > 1000 * (1024 + 256)


def test_the_number_is_bounded_too_and_what_is_too_large_is_not_stored() -> None:
    store = ResponseStore(StoreLimits(max_stored_responses=2, max_stored_bytes=100_000), Time())
    for number in range(5):
        store.put("", str(number), stored("x"))
    assert store.count == 2
    assert not store.put("", "large", stored("x", image=bytes(100_000)))
    assert store.count == 2
    assert not ResponseStore(StoreLimits(max_stored_responses=0), Time()).put("", "a", stored("x"))
    with pytest.raises(ValueError, match="stored_response_s must not be negative"):
        StoreLimits(stored_response_s=-1)
