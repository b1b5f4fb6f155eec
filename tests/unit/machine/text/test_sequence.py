from triptych.machine.text.prefix_hashes import BlockHashes
from triptych.machine.text.sequence import Sequence


def test_lengths_follow_from_the_tokens() -> None:
    one = Sequence(request_id="r", choice=2, token_ids=[5, 6, 7], prompt_tokens=3, max_tokens=4)
    assert (one.sequence_id, one.length, one.generated, one.answer, one.left_tokens) == ("r/2", 3, 0, [], 4)
    one.append(8)
    one.append(9)
    assert (one.length, one.generated, one.answer, one.left_tokens) == (5, 2, [8, 9], 2)


def test_a_sequence_decodes_when_all_but_its_last_token_are_computed() -> None:
    one = Sequence(request_id="r", token_ids=[5, 6, 7], prompt_tokens=3, max_tokens=4)
    one.computed = 2
    states = [one.is_decoding]  # the last token of the prompt is prefill
    one.computed = 3
    one.append(8)
    states.append(one.is_decoding)
    one.computed = 0  # preempted
    states.append(one.is_decoding)
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
    one = Sequence(request_id="r", token_ids=[5, 6, 7], prompt_tokens=3, max_tokens=4, prefix_hashes=hashes)
    one.append(8)
    assert hashes.hashes == BlockHashes(2, [5, 6, 7, 8], (), salt=b"").hashes
