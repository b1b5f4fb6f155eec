from triptych.policy.backlog import Held, Work
from triptych.policy.placement.wants import RequestWant, Want


def test_an_item_asks_for_its_encoding() -> None:
    item = Want(0, 5, 10, (b"cat", b""), media_nbytes=7, pixels=9)
    assert item.work({}) == Work(5, 10, 7, 9)
    assert not item.holders
    assert Want(0, 5, 10, (b"cat", b"")).work({}) == Work(5, 10), "its media is not known"


def test_a_request_asks_for_its_prompt_its_answers_and_what_must_be_pulled() -> None:
    request = RequestWant(5, answer_tokens=20, choices=3, holders={"i-a": 4, "i-b": 6})
    assert request.work({"i-a": "h"}) == Work(5, answer_tokens=20, held=Held({"i-a": 4, "i-b": 6}, {"h": 4}, 10))
    assert RequestWant(5).work({}) == Work(5), "of the answer nothing is expected yet"
    assert RequestWant(5, answer_tokens=20).all_answer_tokens == 20
    assert (request.all_answer_tokens, request.content) == (60, None)
