from triptych.domain.embedding import DType
from triptych.domain.kv_segment import KvKind, KvSegment
from triptych.domain.queue_position import QueuePosition
from triptych.machine.text.host_copies import HostCopy
from triptych.machine.text.prefix_hashes import BlockHashes
from triptych.machine.text.sequence import Sequence


def test_lengths_follow_from_the_tokens() -> None:
    sequence = Sequence(request_id="r", choice=2, token_ids=[5, 6, 7], prompt_tokens=3, max_tokens=4)
    assert (sequence.sequence_id, sequence.length, sequence.generated, sequence.answer, sequence.left_tokens) == (
        "r/2",
        3,
        0,
        [],
        4,
    )
    sequence.append(8)
    sequence.append(9)
    assert (sequence.length, sequence.generated, sequence.answer, sequence.left_tokens) == (5, 2, [8, 9], 2)


def test_a_sequence_decodes_when_all_but_its_last_token_are_computed() -> None:
    sequence = Sequence(request_id="r", token_ids=[5, 6, 7], prompt_tokens=3, max_tokens=4)
    sequence.computed = 2
    states = [sequence.is_decoding]  # the last token of the prompt is prefill
    sequence.computed = 3
    sequence.append(8)
    states.append(sequence.is_decoding)
    sequence.computed = 0  # preempted
    states.append(sequence.is_decoding)
    assert states == [False, True, False]


def test_pending_tokens_include_those_of_further_choices() -> None:
    leader, follower = (
        Sequence(request_id="r", choice=choice, token_ids=[5, 6, 7], prompt_tokens=3, max_tokens=4) for choice in (0, 1)
    )
    leader.followers = [follower]
    assert leader.pending_tokens == 3 + 4 + 4
    leader.followers, leader.computed = [], 3
    leader.append(8)
    assert leader.pending_tokens == 3


def test_hashes_grow_with_the_tokens() -> None:
    hashes = BlockHashes(2, [5, 6, 7], (), salt=b"")
    sequence = Sequence(request_id="r", token_ids=[5, 6, 7], prompt_tokens=3, max_tokens=4, prefix_hashes=hashes)
    sequence.append(8)
    assert hashes.hashes == BlockHashes(2, [5, 6, 7, 8], (), salt=b"").hashes


def test_a_sequence_computes_nothing_while_its_first_tokens_arrive_or_it_is_paused() -> None:
    sequence = Sequence(request_id="r", token_ids=[5, 6, 7], prompt_tokens=3, max_tokens=4, arriving=2)
    assert (sequence.is_arriving, sequence.is_idle, sequence.pending_tokens) == (True, True, 1 + 4)
    sequence.computed = 2
    assert (sequence.is_arriving, sequence.is_idle, sequence.pending_tokens) == (False, False, 1 + 4)
    sequence.pauses = True
    sequence.append(8)
    assert (sequence.is_idle, sequence.pending_tokens) == (True, 0)


def test_a_copy_in_host_memory_need_not_be_computed_again() -> None:
    kind = KvKind("model", DType.F32, layers=1, heads=1, head_size=1)
    sequence = Sequence(request_id="r", token_ids=[5, 6, 7, 8], prompt_tokens=3, max_tokens=4)
    assert sequence.pending_tokens == 3 + 3, "it was preempted"
    sequence.copy = HostCopy(KvSegment(kind, 0, 2), 0)
    assert sequence.pending_tokens == 1 + 3
    sequence.copy, sequence.computed = None, 4
    assert sequence.pending_tokens == 3, "its next token is about to come"


def test_sequences_go_by_their_positions_then_in_order_of_arrival_then_by_choice() -> None:
    def order(arrival: int, choice: int, due_s: float = 1.0) -> tuple[QueuePosition, int, int]:
        position = QueuePosition(0, due_s, 0)
        return Sequence(
            request_id="r",
            choice=choice,
            token_ids=[5],
            prompt_tokens=1,
            max_tokens=1,
            queue_position=position,
            arrival=arrival,
        ).order

    late, first, second, third = order(2, 1), order(9, 1, due_s=0.5), order(1, 1), order(2, 0)
    assert sorted([late, third, second, first]) == [first, second, third, late]
