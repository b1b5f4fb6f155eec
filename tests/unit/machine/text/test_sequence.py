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
