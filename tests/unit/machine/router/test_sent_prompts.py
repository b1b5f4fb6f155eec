from triptych.machine.router.sent_prompts import SentPrompts

ONE, TWO = (tuple(b"%b%d" % (name, at) for at in range(4)) for name in (b"one", b"two"))
SEGMENT = 100


def test_a_prompt_is_cached_where_it_was_sent() -> None:
    prompts = SentPrompts()
    prompts.sent("a", ONE[:3], SEGMENT, 0)
    assert [prompts.cached("a", keys) for keys in (ONE, ONE[:2], TWO, ())] == [3, 2, 0, 0]
    assert prompts.cached("b", ONE) == 0


def test_memory_bounds_it_and_ends_go_before_beginnings() -> None:
    prompts = SentPrompts()
    prompts.sent("a", ONE, SEGMENT, 1200)
    prompts.sent("a", TWO, SEGMENT, 1200)
    assert (prompts.cached("a", ONE), prompts.cached("a", TWO)) == (2, 4)
    prompts.sent("a", ONE, SEGMENT, 1200)
    assert (prompts.cached("a", ONE), prompts.cached("a", TWO)) == (4, 2)


def test_instances_are_forgotten() -> None:
    prompts = SentPrompts()
    for name in ("a", "b"):
        prompts.sent(name, ONE, SEGMENT, 0)
    prompts.keep(("b", "c"))
    assert (prompts.cached("a", ONE), prompts.cached("b", ONE)) == (0, 4)
