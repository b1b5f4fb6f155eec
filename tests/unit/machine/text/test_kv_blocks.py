from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.examples import examples
from triptych.machine.text.kv_blocks import Copy, KvBlocks


def named(blocks: KvBlocks, owner: str, keys: str) -> None:
    for index, key in enumerate(keys):
        blocks.register_hash(owner, index, key.encode())


def keys(text: str) -> list[bytes]:
    return [key.encode() for key in text]


def test_adjacent_owners_grow_in_place() -> None:
    blocks = KvBlocks(20, contiguous=True)
    assert blocks.allocate("a", 2, room=6) == ()
    assert blocks.allocate("b", 2, room=4) == ()
    for _ in range(4):
        assert blocks.allocate("a", 1) == ()
    assert blocks.allocate("b", 2) == ()
    assert list(blocks.table("a")) == [0, 1, 2, 3, 4, 5]
    assert blocks.is_contiguous("a")
    assert blocks.is_contiguous("b")
    blocks.validate()


def test_an_owner_blocked_by_an_adjacent_one_moves_once() -> None:
    blocks = KvBlocks(12, contiguous=True)
    blocks.allocate("a", 2)
    blocks.allocate("b", 2)
    blocks.register_hash("a", 0, b"k")
    assert blocks.allocate("a", 1, room=5) == (Copy((0, 1), (4, 5)),)
    assert list(blocks.table("a")) == [4, 5, 6]
    assert blocks.find([b"k"]) == (4,)
    assert blocks.allocate("a", 1) == ()
    blocks.validate()


def test_without_a_contiguous_range_an_owner_continues_in_pieces() -> None:
    blocks = KvBlocks(5, contiguous=True)
    blocks.allocate("a", 2)
    blocks.allocate("b", 1)
    assert blocks.allocate("a", 2) == ()
    assert not blocks.is_contiguous("a")
    assert blocks.allocate("b", 1) is None
    blocks.free("b")
    assert blocks.available == 1
    blocks.validate()


def test_placement_leaves_room_for_others_to_grow() -> None:
    blocks = KvBlocks(10, contiguous=True)
    blocks.allocate("a", 2, room=6)
    blocks.allocate("b", 3, room=9)
    assert list(blocks.table("b")) == [6, 7, 8], "there is no room for nine"
    blocks.free("b")
    blocks.allocate("b", 5)
    assert list(blocks.table("b")) == [5, 6, 7, 8, 9], "as far as possible from owners that may grow"
    blocks.validate()


def test_small_free_runs_make_a_table_of_several_runs() -> None:
    blocks = KvBlocks(9, contiguous=True)
    for owner, count in (("a", 2), ("b", 1), ("c", 2), ("d", 1)):
        blocks.allocate(owner, count)
    blocks.free("a")
    blocks.free("c")
    assert blocks.allocate("e", 4) == ()
    assert (len(set(blocks.table("e"))), blocks.is_contiguous("e")) == (4, False)
    blocks.validate()


def test_cached_blocks_are_evicted_for_a_growing_owner() -> None:
    blocks = KvBlocks(3, contiguous=True)
    blocks.allocate("a", 2)
    blocks.allocate("b", 1)
    named(blocks, "b", "k")
    blocks.free("b")
    assert blocks.find(keys("k")) == (2,)
    assert blocks.allocate("a", 1) == ()
    assert list(blocks.table("a")) == [0, 1, 2]
    assert (blocks.find(keys("k")), blocks.cached) == ((), 0)
    blocks.validate()


def test_untrusted_blocks_are_not_found_and_not_cached() -> None:
    blocks = KvBlocks(6, contiguous=False)
    blocks.allocate("a", 3)
    named(blocks, "a", "xy")
    blocks.evict_hashes("a")
    blocks.evict_hashes("unknown")
    assert blocks.find(keys("xy")) == ()
    blocks.validate()
    blocks.free("a")
    assert (blocks.cached, blocks.available) == (0, 6)


def test_a_fork_shares_full_blocks_and_copies_the_rest() -> None:
    blocks = KvBlocks(8, contiguous=False)
    blocks.allocate("a", 4)
    blocks.allocate("b", 2)
    blocks.allocate("c", 2)
    own = list(blocks.table("b"))
    a = list(blocks.table("a"))
    assert blocks.fork("a", "b", 2, 3) == (Copy((a[2],), (own[0],)),)
    assert list(blocks.table("b")) == [*a[:2], *own]
    assert blocks.fork("a", "c", 2, 2) == (), "there are no other blocks"
    blocks.validate()
    blocks.free("a")
    assert blocks.available == 2, "two of its blocks are shared"


def test_a_fork_of_a_contiguous_owner_copies_all_blocks() -> None:
    blocks = KvBlocks(8, contiguous=True)
    blocks.allocate("a", 3)
    blocks.allocate("b", 4)
    assert blocks.fork("a", "b", 1, 2) == (Copy((0, 1), (3, 4)),)
    blocks.validate()


def test_a_transfer_moves_the_table_to_another_owner() -> None:
    blocks = KvBlocks(6, contiguous=True)
    blocks.allocate("a", 2)
    blocks.allocate("b", 3)
    blocks.transfer("a", "b")
    assert (list(blocks.table("b")), list(blocks.table("a")), blocks.available) == ([0, 1], [], 4)
    assert blocks.allocate("b", 1) == ()
    assert list(blocks.table("b")) == [0, 1, 2]
    blocks.transfer("unknown", "b")
    assert blocks.available == 6
    blocks.validate()


def test_registered_blocks_are_cached_and_evicted_from_the_end_of_the_oldest() -> None:
    blocks = KvBlocks(6, contiguous=False)
    blocks.allocate("a", 3)
    named(blocks, "a", "xyz")
    blocks.free("a")
    assert (blocks.available, blocks.cached) == (6, 3)
    assert len(blocks.find(keys("xyz"))) == 3
    blocks.allocate("b", 4)
    assert len(blocks.find(keys("xyz"))) == 2
    assert blocks.find(keys("yz")) != ()
    assert blocks.find(keys("?x")) == ()
    blocks.validate()


def test_all_blocks_without_an_owner_can_be_evicted_at_once() -> None:
    blocks = KvBlocks(6, contiguous=False)
    for owner, names in (("a", "xy"), ("b", "z")):
        blocks.allocate(owner, len(names))
        named(blocks, owner, names)
    blocks.free("a")
    blocks.evict_cached()
    assert (blocks.cached, blocks.available, blocks.find(keys("xy"))) == (0, 5, ())
    assert len(blocks.find(keys("z"))) == 1, "it has an owner"
    blocks.validate()


def test_shared_blocks_are_freed_with_their_last_owner() -> None:
    blocks = KvBlocks(6, contiguous=False)
    blocks.allocate("a", 2)
    named(blocks, "a", "xy")
    blocks.share("b", blocks.find(keys("xy")))
    blocks.allocate("b", 1)
    blocks.free("a")
    assert (blocks.available, blocks.cached) == (3, 0)
    blocks.free("b")
    assert [blocks.available, blocks.cached] == [6, 2]
    blocks.validate()


def test_sources_of_a_copy_are_not_evicted_during_it() -> None:
    blocks = KvBlocks(4, contiguous=True)
    blocks.allocate("a", 2)
    named(blocks, "a", "xy")
    blocks.free("a")
    assert blocks.copy_in("b", blocks.find(keys("xy")), 3) is None
    assert (blocks.available, list(blocks.table("b"))) == (4, [])
    copies = blocks.copy_in("b", blocks.find(keys("xy")), 2)
    assert copies == (Copy((0, 1), (2, 3)),)
    blocks.validate()


class KvBlocksModel(RuleBasedStateMachine):
    """Any order of operations: blocks that are owned or found keep the contents their owner wrote."""

    @initialize(contiguous=st.booleans())
    def begin(self, contiguous: bool) -> None:
        self.kv = KvBlocks(24, contiguous=contiguous)
        self.memory: dict[int, str] = {}
        self.wrote: dict[str, list[str]] = {}
        self.written = 0

    def do(self, copies: tuple[Copy, ...]) -> None:
        for copy in copies:
            contents = [self.memory.get(block, "") for block in copy.source]
            self.memory.update(zip(copy.target, contents, strict=True))

    def write(self, owner: str) -> None:
        table = self.kv.table(owner)
        while len(self.wrote[owner]) < len(table):
            self.written += 1
            self.wrote[owner].append(f"c{self.written}")
            self.memory[table[len(self.wrote[owner]) - 1]] = self.wrote[owner][-1]

    @rule(owner=st.sampled_from("abcdef"), count=st.integers(0, 9), extra=st.integers(0, 9))
    def take(self, owner: str, count: int, extra: int) -> None:
        available = self.kv.available
        copies = self.kv.allocate(owner, count, room=count + extra)
        assert (copies is None) == (count > available)
        if copies is not None:
            self.do(copies)
            self.wrote.setdefault(owner, [])
            self.write(owner)

    @rule(owner=st.sampled_from("abcdef"))
    def name(self, owner: str) -> None:
        for index, content in enumerate(self.wrote.get(owner, ())):
            self.kv.register_hash(owner, index, content.encode())

    @rule(owner=st.sampled_from("abcdef"))
    def give(self, owner: str) -> None:
        self.kv.free(owner)
        self.wrote.pop(owner, None)

    @rule(owner=st.sampled_from("ghi"), source=st.sampled_from("abcdef"), count=st.integers(0, 5))
    def begin_with_known(self, owner: str, source: str, count: int) -> None:
        contents = self.wrote.get(source, [])
        found = self.kv.find([content.encode() for content in contents])
        assert [self.memory[block] for block in found] == contents[: len(found)]
        if not found or owner in self.wrote:
            return
        if self.kv.contiguous:
            copies = self.kv.copy_in(owner, found, len(found) + count)
        else:
            self.kv.share(owner, found)
            copies = self.kv.allocate(owner, count)
            if copies is None:
                self.kv.free(owner)
        if copies is not None:
            self.do(copies)
            self.wrote[owner] = contents[: len(found)]
            self.write(owner)

    @rule(owner=st.sampled_from("ghi"))
    def give_known(self, owner: str) -> None:
        self.kv.free(owner)
        self.wrote.pop(owner, None)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.validate()
        for owner, contents in self.wrote.items():
            assert [self.memory[block] for block in self.kv.table(owner)] == contents


TestKvBlocksModel = KvBlocksModel.TestCase
TestKvBlocksModel.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
