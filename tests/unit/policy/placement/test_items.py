from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.item_plan import Content
from triptych.policy.placement.affinity import Having, Holding, nothing_held
from triptych.policy.placement.filters import Filter
from triptych.policy.placement.items import Choice, Shortage, Why, place_hedge, place_items
from triptych.policy.placement.policy import LEAST_LOADED, PlacementPolicy
from triptych.policy.placement.pool import Candidate, Pool
from triptych.policy.placement.wants import Placeable, Want

RNG = Random(7)


def place(pool: Pool, wants: Sequence[Want]) -> tuple[Choice, ...] | Shortage:
    return place_items(pool, wants, LEAST_LOADED, RNG)


def choose_encoder(pool: Pool, want: Want) -> Choice | None:
    choices = place(pool, [want])
    return None if isinstance(choices, Shortage) else choices[0]


def encoder(
    name: str, tokens: int = 0, *, usable: bool = True, items: int = 0, arena: int = 1000, available: int = 1000
) -> Candidate:
    return Candidate(name, usable, tokens, items, arena, available)


def want(item: int = 0, tokens: int = 10, nbytes: int = 10, **fields: object) -> Want:
    return replace(Want(item, tokens, nbytes, (b"%d" % item, b"")), **fields)  # type: ignore[arg-type]


def view(*encoders: Candidate, turn: int = 0, held: Having = nothing_held) -> Pool:
    return Pool(encoders, turn, held)


def held_at(content: Content, *holdings: Holding) -> Having:
    return lambda asked: holdings if asked == content else ()


def chosen(choice: Choice | None) -> str:
    assert isinstance(choice, Choice)
    return choice.encoder


def test_the_least_pending_image_tokens_win() -> None:
    assert chosen(choose_encoder(view(encoder("a", 30), encoder("b", 20), encoder("c", 25)), want())) == "b"


def test_fewer_items_break_a_tie_of_tokens() -> None:
    assert chosen(choose_encoder(view(encoder("a", 20, items=2), encoder("b", 20, items=1)), want())) == "b"


def names_by_content(names: Sequence[str], contents: int) -> list[str]:
    """The encoder that each content prefers, all encoders being idle."""
    pool = view(*(encoder(name) for name in names))
    return [chosen(choose_encoder(pool, want(content=(b"%d" % number, b"")))) for number in range(contents)]


def test_equal_content_prefers_the_same_of_equal_encoders_whatever_their_order_and_turn() -> None:
    names = ["a", "b", "c"]
    by_content = names_by_content(names, 20)
    for number, expected in enumerate(by_content):
        item = want(content=(b"%d" % number, b""))
        orders = [view(*map(encoder, order), turn=turn) for turn, order in enumerate(permutations(names))]
        assert {chosen(choose_encoder(pool, item)) for pool in orders} == {expected}
    salted = [want(content=(b"%d" % number, b"salt")) for number in range(20)]
    assert [chosen(choose_encoder(view(*map(encoder, names)), wanted)) for wanted in salted] != by_content


def test_encoders_are_recognized_by_their_own_ids() -> None:
    names = ["a", "b", "c"]
    ids = [encoder(f"10.0.0.{number}:1")._replace(instance_id=name) for number, name in enumerate(names)]
    for number, expected in enumerate(names_by_content(names, 20)):
        address = chosen(choose_encoder(view(*ids), want(content=(b"%d" % number, b""))))
        assert address == f"10.0.0.{names.index(expected)}:1"


@given(seed=st.integers(0, 10**9), number=st.integers(2, 12))
def test_different_contents_spread_evenly_over_equal_encoders(seed: int, number: int) -> None:
    counts = Counter(names_by_content([f"e{seed + index}:50061" for index in range(number)], 600))
    share = 600 / number
    assert len(counts) == number
    assert max(abs(count - share) for count in counts.values()) < 6 * share**0.5, "six standard deviations"


@given(seed=st.integers(0, 10**9), number=st.integers(2, 12))
def test_an_encoder_that_joins_or_leaves_moves_only_its_share(seed: int, number: int) -> None:
    names = [f"e{seed + index}:50061" for index in range(number)]
    before, after = names_by_content(names, 400), names_by_content([*names, "new"], 400)
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {"new"}
    share = 400 / (number + 1)
    assert abs(len(moved) - share) < 6 * share**0.5, "six standard deviations"


def test_load_overrules_the_preferred_encoder() -> None:
    for number, expected in enumerate(names_by_content(["a", "b"], 20)):
        pool = view(*(encoder(name, 1 if name == expected else 0) for name in ("a", "b")))
        assert chosen(choose_encoder(pool, want(content=(b"%d" % number, b"")))) != expected


def test_equal_items_of_a_request_are_spread_over_equal_encoders() -> None:
    pool = [encoder("a"), encoder("b"), encoder("c", 900)]
    choices = place(view(*pool), [want(item) for item in range(6)])
    assert not isinstance(choices, Shortage)
    assert Counter(choice.encoder for choice in choices) == {"a": 3, "b": 3}


def test_only_usable_encoders_with_room_are_considered() -> None:
    pool = view(encoder("a", usable=False), encoder("b", available=9), encoder("c", 500))
    assert chosen(choose_encoder(pool, want())) == "c"


@pytest.mark.parametrize(
    ("pool", "shortage"),
    [
        (view(), Shortage.NO_ENCODER),
        (view(encoder("a", usable=False)), Shortage.NO_ENCODER),
        (view(encoder("a", available=5)), Shortage.NO_CREDIT),
        (view(encoder("a", arena=5, available=5)), Shortage.NEVER_FITS),
        (view(encoder("a", arena=5, available=5), encoder("b", usable=False)), Shortage.NO_ENCODER),
    ],
)
def test_the_refusal_names_the_missing_resource(pool: Pool, shortage: Shortage) -> None:
    assert choose_encoder(pool, want()) is None
    assert place(pool, [want()]) is shortage


@pytest.mark.parametrize(
    ("holding", "most"),
    [(Holding("b"), 10), (Holding("b", published=True), 90), (Holding("b", encoding=True), 30)],
    ids=["held", "held as published", "being encoded"],
)
def test_an_encoder_with_the_embedding_is_preferred_while_that_takes_no_longer(holding: Holding, most: int) -> None:
    why = Why.ENCODES_ALREADY if holding.encoding else Why.HOLDS_EMBEDDING
    for backlog, expected in ((most, why), (most + 1, Why.ROUTED)):
        pool = view(encoder("a"), encoder("b", backlog), held=held_at((b"0", b""), holding))
        choice = choose_encoder(pool, want())
        assert isinstance(choice, Choice)
        assert choice.why is expected


def test_what_an_encoder_says_it_has_or_is_encoding_adds_no_work() -> None:
    def tokens(holding: Holding) -> int:
        choice = choose_encoder(view(encoder("a"), encoder("b"), held=held_at((b"0", b""), holding)), want())
        assert isinstance(choice, Choice)
        assert (choice.encoder, choice.nbytes) == ("b", 10)
        return choice.tokens

    assert tokens(Holding("b")) == 10, "how often such a hint is wrong is not known"
    assert tokens(Holding("b", published=True)) == tokens(Holding("b", encoding=True)) == 0


def test_a_holder_without_room_or_that_failed_the_item_is_passed_over() -> None:
    both = held_at((b"0", b""), Holding("a", published=True), Holding("b", encoding=True))
    pool = view(encoder("a", available=5), encoder("b", 10), encoder("c"), held=both)
    choice = choose_encoder(pool, want())
    assert isinstance(choice, Choice)
    assert (choice.encoder, choice.why) == ("b", Why.ENCODES_ALREADY)
    assert chosen(choose_encoder(pool, want(exclude=frozenset("b")))) == "c"


def test_an_encoder_that_failed_the_item_is_the_last_resort() -> None:
    failed = want(avoid=frozenset({"a"}))
    assert chosen(choose_encoder(view(encoder("a"), encoder("b", 900)), failed)) == "b"
    choice = choose_encoder(view(encoder("a"), encoder("b", usable=False)), failed)
    assert isinstance(choice, Choice)
    assert (choice.encoder, choice.why) == ("a", Why.LAST_RESORT)


def test_items_of_one_request_are_balanced_largest_first() -> None:
    sizes = [10, 70, 20, 60, 30, 50]
    choices = place(view(encoder("a"), encoder("b")), [want(i, tokens) for i, tokens in enumerate(sizes)])
    assert not isinstance(choices, Shortage)
    loads = {name: sum(choice.tokens for choice in choices if choice.encoder == name) for name in "ab"}
    assert loads == {"a": 120, "b": 120}
    assert [choice.item for choice in choices] == list(range(6))


def test_all_items_are_placed_or_none() -> None:
    pool = view(encoder("a", available=25), encoder("b", available=15))
    assert not isinstance(place(pool, [want(i) for i in range(3)]), Shortage)
    assert place(pool, [want(i) for i in range(4)]) is Shortage.NO_CREDIT


def test_more_than_all_arenas_together_never_fits() -> None:
    pool = view(encoder("a", arena=25, available=25), encoder("b", arena=25, available=25))
    assert place(pool, [want(i) for i in range(6)]) is Shortage.NEVER_FITS


def test_items_without_a_packing_are_refused_instead_of_waiting() -> None:
    pool = view(encoder("a", arena=10, available=0), encoder("b", arena=10, available=0))
    assert place(pool, [want(i, nbytes=6) for i in range(2)]) is Shortage.NO_CREDIT
    assert place(pool, [want(i, nbytes=6) for i in range(3)]) is Shortage.NEVER_FITS


def test_a_packing_missed_by_largest_first_is_found() -> None:
    wants = [want(i, size, nbytes=size) for i, size in enumerate([6, 4, 4, 3, 3])]
    pool = view(encoder("a", arena=10, available=10), encoder("b", arena=10, available=10))
    choices = place(pool, wants)
    assert not isinstance(choices, Shortage)
    for name in "ab":
        assert sum(choice.nbytes for choice in choices if choice.encoder == name) == 10
    full = view(encoder("a", arena=10, available=10), encoder("b", arena=10, available=9))
    assert place(full, wants) is Shortage.NO_CREDIT
    overdrawn = encoder("c", arena=2, available=-5)
    assert not isinstance(place(view(*pool.candidates, overdrawn), wants), Shortage)
    again = place(pool, [*wants, want(5, 6, nbytes=6, content=wants[0].content)])
    assert not isinstance(again, Shortage)
    first, same = again[0], again[5]
    assert (same.encoder, same.tokens, same.nbytes, same.why) == (first.encoder, 0, 0, Why.SAME_CONTENT)


def test_a_tight_packing_is_found_from_the_largest_item_on() -> None:
    pool = view(*(encoder(f"e{n}", arena=15, available=15) for n in range(5)))
    sizes = [8, 11, 9, 4, 4, 10, 5, 6, 15]
    choices = place(pool, [want(item, 1, nbytes=size) for item, size in enumerate(sizes)])
    assert not isinstance(choices, Shortage)
    assert {choice.why for choice in choices} == {Why.ONLY_PACKING}


def test_an_item_as_large_as_an_arena_fits() -> None:
    assert chosen(choose_encoder(view(encoder("a", arena=10, available=10)), want(nbytes=10))) == "a"


def test_the_packing_search_is_bounded_and_giving_up_is_not_a_permanent_refusal() -> None:
    pool = view(*(encoder(f"e{n}", arena=10, available=10) for n in range(12)))
    assert place(pool, [want(item, nbytes=6) for item in range(13)]) is Shortage.NO_ENCODER


def test_no_permanent_refusal_while_an_encoder_is_unknown() -> None:
    pool = view(encoder("a", arena=5, available=5), encoder("b", usable=False, arena=0, available=0))
    assert place(pool, [want()]) is Shortage.NO_ENCODER


def test_an_encoder_at_its_item_limit_gets_no_more() -> None:
    busy = encoder("a", items=4)._replace(max_items=4)
    assert chosen(choose_encoder(view(busy, encoder("b", 900)), want())) == "b"
    assert place(view(busy), [want()]) is Shortage.NO_CREDIT
    pair = view(encoder("a")._replace(max_items=2), encoder("b", 900))
    choices = place(pair, [want(item) for item in range(3)])
    assert not isinstance(choices, Shortage)
    assert sorted(choice.encoder for choice in choices) == ["a", "a", "b"]
    single = encoder("a", items=1)._replace(max_items=1)
    assert place(view(single), [want()]) is Shortage.NO_CREDIT


def test_more_items_than_the_encoders_take_at_once_are_not_called_too_large() -> None:
    takes = [encoder(name, items=1)._replace(max_items=2) for name in "ab"]
    assert place(view(*takes), [want(item) for item in range(4)]) is Shortage.NO_CREDIT
    assert place(view(*takes), [want(item) for item in range(5)]) is Shortage.TOO_MANY_ITEMS
    assert place(view(*takes), [want(item, nbytes=401) for item in range(5)]) is Shortage.NEVER_FITS
    same = [want(item, content=(b"same", b"")) for item in range(5)]
    assert not isinstance(place(view(*takes), same), Shortage)
    unknown = encoder("c", usable=False, arena=0, available=0)
    assert place(view(*takes, unknown), [want(item) for item in range(5)]) is Shortage.NO_ENCODER


def test_the_number_of_items_is_refused_without_a_search() -> None:
    takes = [encoder(name, arena=10_000, available=10_000)._replace(max_items=256) for name in "ab"]
    assert place(view(*takes), [want(item) for item in range(513)]) is Shortage.TOO_MANY_ITEMS


def test_an_encoder_in_backoff_is_avoided_while_another_is_usable() -> None:
    backed_off = encoder("a")._replace(backoff=True)
    assert chosen(choose_encoder(view(backed_off, encoder("b", 900)), want())) == "b"
    assert place(view(backed_off, encoder("b", available=5)), [want()]) is Shortage.NO_CREDIT
    assert chosen(choose_encoder(view(backed_off, encoder("b", usable=False)), want())) == "a"
    assert place(view(encoder("a")), [want(exclude=frozenset({"a"}))]) is Shortage.NO_ENCODER


def test_an_encoder_on_probation_gets_one_item_at_a_time() -> None:
    pool = view(encoder("a")._replace(probation=True), encoder("b", 900))
    choices = place(pool, [want(item) for item in range(4)])
    assert not isinstance(choices, Shortage)
    assert sorted(choice.encoder for choice in choices) == ["a", "b", "b", "b"]
    alone = place(view(encoder("a")._replace(probation=True)), [want(item) for item in range(4)])
    assert not isinstance(alone, Shortage)
    assert {choice.encoder for choice in alone} == {"a"}, "unless there is no other"


def test_a_hedge_goes_to_an_encoder_without_work_or_to_none() -> None:
    wanted = want(exclude=frozenset("a"), avoid=frozenset("b"))
    idle = [encoder(name) for name in "abcdef"]
    idle[2] = idle[2]._replace(backoff=True)
    idle[3] = idle[3]._replace(probation=True)
    idle[4] = idle[4]._replace(available_bytes=0)
    assert place_hedge(view(*idle), wanted, LEAST_LOADED, RNG) == ("f", 10)
    idle[5] = idle[5]._replace(pending=1, pending_tokens=1)
    assert place_hedge(view(*idle), wanted, LEAST_LOADED, RNG) is None


def test_a_hedge_goes_to_an_encoder_that_has_the_embedding_or_soon_will() -> None:
    wanted = want(exclude=frozenset("a"))
    encoders = [encoder("a"), encoder("b"), encoder("c", 10, items=1)]

    def hedged(*holdings: Holding) -> tuple[str, int] | None:
        return place_hedge(view(*encoders, held=held_at(wanted.content, *holdings)), wanted, LEAST_LOADED, RNG)

    assert hedged(Holding("a", encoding=True)) == ("b", 10), "not to the one where it takes long"
    assert hedged(Holding("c", published=True)) == ("c", 0)
    assert hedged(Holding("c", encoding=True)) == ("c", 0), "it joins another hedge"
    encoders[2] = encoder("c", 31, items=4)
    assert hedged(Holding("c", encoding=True)) == ("b", 10)


def test_the_same_content_is_encoded_once() -> None:
    pool = view(encoder("a", arena=10, available=10))
    choices = place(pool, [want(0, nbytes=7), want(1, content=(b"0", b"")), want(2, nbytes=3)])
    assert not isinstance(choices, Shortage)
    assert [(choice.encoder, choice.tokens, choice.nbytes, choice.why) for choice in choices] == [
        ("a", 10, 7, Why.ROUTED),
        ("a", 0, 0, Why.SAME_CONTENT),
        ("a", 10, 3, Why.ROUTED),
    ]


@given(
    loads=st.lists(st.integers(0, 500), min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=20),
    room=st.integers(0, 1000),
    turn=st.integers(0, 100),
)
def test_an_assignment_covers_every_item_within_the_available_room(
    loads: list[int], sizes: list[int], room: int, turn: int
) -> None:
    pool = view(*(encoder(f"e{n}", load, arena=2000, available=room) for n, load in enumerate(loads)), turn=turn)
    choices = place(pool, [want(index, size, size) for index, size in enumerate(sizes)])
    if isinstance(choices, Shortage):
        assert choices is Shortage.NO_CREDIT or sum(sizes) > 2000 * len(loads)
        return
    assert [choice.item for choice in choices] == list(range(len(sizes)))
    placed = {
        candidate.name: sum(c.tokens for c in choices if c.encoder == candidate.name) for candidate in pool.candidates
    }
    assert all(tokens <= room for tokens in placed.values())
    if sum(sizes) <= room:
        # Least loaded first: with enough room, no encoder is ahead by more than one of its items.
        ends = {candidate.name: candidate.pending_tokens + placed[candidate.name] for candidate in pool.candidates}
        assert all(ends[name] - min(ends.values()) <= max(sizes) for name, tokens in placed.items() if tokens)


def test_filters_of_a_policy_hold_wherever_an_item_is_placed() -> None:
    not_a: Filter[Placeable] = Filter(lambda pool, _, places: [at for at in places if pool.name[at] != "a"])
    policy = replace(LEAST_LOADED, filters=(not_a,))
    even = view(encoder("a"), encoder("b", 900))
    (choice,) = placed(even, [want()], policy)
    assert choice.encoder == "b"
    assert place_items(view(encoder("a"), encoder("b", available=5)), [want()], policy, RNG) is Shortage.NO_CREDIT
    assert place_hedge(even, want(), policy, RNG) == ("b", 10)
    sizes = [6, 4, 4, 3, 3]
    tight = view(*(encoder(name, arena=10, available=10) for name in "abc"))
    choices = placed(tight, [want(i, size, nbytes=size) for i, size in enumerate(sizes)], policy)
    assert {choice.encoder for choice in choices} == {"b", "c"}
    assert {choice.why for choice in choices} == {Why.ONLY_PACKING}


def placed(pool: Pool, wants: Sequence[Want], policy: PlacementPolicy) -> tuple[Choice, ...]:
    choices = place_items(pool, wants, policy, RNG)
    assert not isinstance(choices, Shortage)
    return choices
