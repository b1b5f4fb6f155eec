import sys
from random import Random

import pytest

from triptych.domain.embedding_hints import MAX_HINTS, EmbeddingHints, hint_of
from triptych.machine.arena.published import PublishedContents
from triptych.machine.router.embedding_directory import EmbeddingDirectory, KnownSlot
from triptych.policy.placement.affinity import Holding

CAT, DOG, FOX = ((name, b"") for name in (b"cat", b"dog", b"fox"))
HELD, ENCODING = Holding("a", published=True), Holding("a", encoding=True, published=True)


def directory(limit: int = 100) -> EmbeddingDirectory:
    return EmbeddingDirectory(limit)


def report(sequence: int, *, held: tuple = (), encoding: tuple = (), dropped: tuple = ()) -> EmbeddingHints:  # type: ignore[type-arg]
    return EmbeddingHints(sequence, *(tuple(map(hint_of, contents)) for contents in (held, encoding, dropped)))


def test_what_an_encoder_publishes_is_known_until_it_is_dropped() -> None:
    known = directory()
    assert not known.apply_hints("a", report(1, held=(CAT,), encoding=(DOG,)))
    assert (known.holders(CAT), known.holders(DOG), known.holders(FOX)) == ((HELD,), (ENCODING,), ())
    assert not known.apply_hints("a", report(2, held=(DOG,), dropped=(CAT,)))
    assert (known.holders(CAT), known.holders(DOG)) == ((), (HELD,))
    known.validate()


def test_holders_come_before_those_that_are_encoding() -> None:
    known = directory()
    known.apply_hints("a", report(1, encoding=(CAT,)))
    known.apply_hints("b", report(1, held=(CAT,)))
    assert [holder.name for holder in known.holders(CAT)] == ["b", "a"]
    known.apply_hints("a", report(2, held=(CAT,)))
    known.apply_hints("b", report(2, encoding=(CAT,)))
    assert [holder.name for holder in known.holders(CAT)] == ["a", "b"]
    known.validate()


def test_the_routers_own_calls_are_known_before_they_are_reported() -> None:
    known = directory()
    known.began(CAT, "a")
    known.began(CAT, "a")
    assert known.holders(CAT) == [Holding("a", encoding=True)]
    known.ended(CAT, "a")
    assert known.holders(CAT) == [Holding("a", encoding=True)], "the other one goes on"
    known.remember(CAT, "a")
    assert known.holders(CAT) == [Holding("a")]
    known.ended(CAT, "a")
    known.gone(CAT, "a")
    assert known.holders(CAT) == ()
    known.ended(CAT, "a")
    known.validate()


def test_what_the_router_has_learnt_by_itself_ends_when_the_encoder_says_so() -> None:
    known = directory()
    known.apply_hints("a", report(1))
    known.remember(CAT, "a")
    assert known.holders(CAT) == (HELD,)
    known.apply_hints("a", report(2, dropped=(CAT,)))
    assert known.holders(CAT) == ()


@pytest.mark.parametrize("sequences", [(1, 3), (2,), (1, 2, 4, 3)], ids=["lost", "begun late", "reordered"])
def test_a_missing_report_ends_all_hints_until_the_reports_start_over(sequences: tuple[int, ...]) -> None:
    known = directory()
    known.apply_hints("b", report(1, held=(CAT,)))
    behind = [known.apply_hints("a", report(sequence, held=(CAT,))) for sequence in sequences]
    assert behind.count(True) == 1
    assert [holder.name for holder in known.holders(CAT)] == ["b"]
    assert not known.apply_hints("a", report(9, held=(CAT,))), "this is said once"
    known.apply_hints("a", report(1, held=(DOG,)))
    assert [holder.name for holder in known.holders(CAT)] == ["b"]
    assert known.holders(DOG) == (HELD,)
    known.validate()


def test_a_report_that_comes_twice_or_late_has_no_effect() -> None:
    known = directory()
    first, second = report(1, held=(CAT,)), report(2, dropped=(CAT,))
    for hints in (first, second, second):
        assert not known.apply_hints("a", hints)
    assert known.holders(CAT) == ()


def test_starting_over_replaces_what_was_known() -> None:
    known = directory()
    known.apply_hints("a", report(1, held=(CAT, DOG)))
    known.apply_hints("a", report(1, held=(FOX,)))
    assert (known.holders(CAT), known.holders(DOG), known.holders(FOX)) == ((), (), (HELD,))
    assert len(known) == 1


def test_tenants_do_not_see_each_others_embeddings() -> None:
    known = directory()
    known.apply_hints("a", report(1, held=((b"cat", b"one"),)))
    assert known.holders((b"cat", b"one")) == (HELD,)
    assert known.holders((b"cat", b"two")) == known.holders((b"catone", b"")) == ()


@pytest.mark.parametrize("seed", range(3))
def test_a_router_knows_what_a_busy_encoder_publishes(seed: int) -> None:
    """Random changes, readers that come late and fall behind: in the end each knows exactly what there is."""
    rng = Random(seed)
    published = PublishedContents(limit=300)
    state: dict[bytes, bool] = {}
    watchers = [(directory(10_000), published.reader()) for _ in range(3)]
    lagging = watchers[0]
    for step in range(4000):
        key = b"%d" % rng.randrange(250)
        content = (key, b"salt")
        match rng.randrange(3):
            case 0 if key not in state:
                published.encoding(key, content)
                state[key] = True
            case 1 if state.get(key):
                state[key] = False
                if held := rng.random() < 0.8:
                    published.held(key, content)
                else:
                    del state[key]
                published.encoding_ended(key, held=held)
            case 2 if state.get(key) is False:
                published.gone(key)
                del state[key]
        if step == 2000:
            watchers.append((directory(10_000), published.reader()))
        for watcher in watchers:
            if watcher is not lagging and rng.random() < 0.1 and (hints := watcher[1].report()) is not None:
                assert not watcher[0].apply_hints("a", hints)
    published.validate()
    for known, reader in watchers:
        while reader.is_behind():
            hints = reader.report()
            assert hints is not None
            assert len(hints.held) + len(hints.encoding) + len(hints.dropped) <= MAX_HINTS
            assert not known.apply_hints("a", hints)
        assert reader.report() is None
        known.validate()
        found = {key: known.holders((key, b"salt")) for key in (b"%d" % number for number in range(250))}
        assert {key: held[0].encoding for key, held in found.items() if held} == state


def test_keys_that_callers_were_told_are_bounded_and_end_with_the_encoder() -> None:
    known = EmbeddingDirectory(10, max_keys=2)
    slots = {key: KnownSlot("a", number, CAT, 10) for number, key in enumerate((b"one", b"two", b"three"))}
    for key in (b"one", b"two", b"one", b"three"):
        known.told_key(key, slots[key])
    assert [known.slot_of(key) for key in slots] == [slots[b"one"], None, slots[b"three"]]
    known.remember(CAT, "a")
    known.key_gone(b"one", KnownSlot("a", 9, CAT, 10))
    assert known.slot_of(b"one") is not None, "another slot is gone"
    known.key_gone(b"one", slots[b"one"])
    assert known.slot_of(b"one") is None
    assert known.holders(CAT) == (), "no item is sent there for it either"
    known.forget("a")
    assert known.slot_of(b"three") is not None, "it may be leaving"
    known.forget_keys("a")
    assert known.slot_of(b"three") is None
    known.validate()


def test_memory_and_traffic_are_bounded() -> None:
    """Six encoders with 40,000 embeddings each."""
    limit, kept = 65_536, 40_000
    known = directory(limit)
    for number in range(6):
        published = PublishedContents(limit=kept)
        for item in range(kept + 1000):
            content = (b"%d %d" % (number, item), b"")
            published.held(content[0], content)
        reader, reports = published.reader(), 0
        while reader.is_behind():
            hints = reader.report()
            assert hints is not None
            known.apply_hints(f"10.0.0.{number}:50052", hints)
            reports += 1
            assert len(hints.held) <= MAX_HINTS
        assert (len(published), reports) == (kept, -(-kept // MAX_HINTS))
        assert len(known) <= limit
    known.validate()
    assert len(known) == limit
    assert known.holders((b"5 %d" % (kept + 999), b"")), "the latest are known"
    tables = sys.getsizeof(known._held) + sum(sys.getsizeof(hints) for hints in known._of.values())
    assert tables + limit * sys.getsizeof(bytes(16)) < 48 << 20
    for number in range(6):
        known.forget(f"10.0.0.{number}:50052")
    assert not known
    known.validate()
