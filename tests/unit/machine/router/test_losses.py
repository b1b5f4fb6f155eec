"""How many instances may end while they work on a request."""

from triptych.machine.router.losses import Loss, Losses

A, B, C = Loss("a:1", 1), Loss("b:1", 1), Loss("c:1", 1)
NOBODY = frozenset[Loss]()


def test_the_first_loss_makes_a_request_suspect_and_the_second_is_too_many() -> None:
    losses = Losses()
    assert not losses.lost
    losses.add(A, NOBODY, certain=False)
    assert losses.lost
    assert not losses.too_many
    losses.add(B, NOBODY, certain=False)
    assert losses.too_many


def test_several_calls_that_end_with_one_instance_are_one_loss_and_a_restarted_one_is_another() -> None:
    losses = Losses()
    for _ in range(3):
        losses.add(A, NOBODY, certain=False)
    assert not losses.too_many
    losses.add(Loss("a:1", 2), NOBODY, certain=False)
    assert losses.too_many


def test_an_instance_that_still_answers_is_no_loss() -> None:
    losses = Losses()
    losses.add(A, NOBODY, certain=False)
    losses.add(B, frozenset({A, B}), certain=False)
    assert not losses.lost
    losses.add(C, NOBODY, certain=False)
    assert not losses.too_many


def test_what_an_engine_has_said_stands_although_its_process_still_answers() -> None:
    losses = Losses()
    losses.add(A, NOBODY, certain=True)
    losses.add(B, frozenset({A}), certain=False)
    assert losses.too_many


def test_only_a_loss_that_something_depends_on_has_to_be_made_sure_of() -> None:
    losses = Losses()
    assert losses.doubtful(A, certain=False) == NOBODY
    losses.add(A, NOBODY, certain=False)
    assert losses.doubtful(A, certain=False) == NOBODY
    assert losses.doubtful(B, certain=False) == {A, B}
    assert losses.doubtful(B, certain=True) == {A}
    losses.add(A, NOBODY, certain=True)
    assert losses.doubtful(B, certain=True) == NOBODY


def test_nothing_counts_any_more_once_the_request_got_further() -> None:
    losses = Losses()
    losses.add(A, NOBODY, certain=True)
    losses.got_further()
    assert not losses.lost
    losses.add(B, NOBODY, certain=True)
    assert not losses.too_many
