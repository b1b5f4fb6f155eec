import pytest

from triptych.policy.kv_transfer import ANY_ROOM, LEAST_OUTPUT_TOKENS, KvRoom, always, by_need, has_room


@pytest.mark.parametrize(
    ("expected", "here", "there", "transfers_kv"),
    [
        (100, 1000, 0, True),
        (100, 101, 0, True),
        (100, 100, 0, False),
        (100, 1000, 900, False),
        (LEAST_OUTPUT_TOKENS, 1000, 0, True),
        (LEAST_OUTPUT_TOKENS - 1, 1000, 0, False),
    ],
)
def test_a_long_answer_goes_where_there_is_less_to_decode(
    expected: int, here: int, there: int, transfers_kv: bool
) -> None:
    assert by_need(expected_tokens=expected, here_tokens=here, there_tokens=there) is transfers_kv
    assert always(expected_tokens=expected, here_tokens=here, there_tokens=there)


@pytest.mark.parametrize(
    ("known", "room"),
    [
        (KvRoom(0, 50), ANY_ROOM - 50),
        (KvRoom(100, 30), 70),
        (KvRoom(100, 30, free_tokens=60), 60),
        (KvRoom(100, 30, free_tokens=60, new_tokens=20), 40),
        (KvRoom(100, 30, free_tokens=95), 70),
        (KvRoom(0, 30, free_tokens=60), 60),
        (KvRoom(100, 0, free_tokens=90, idle=True), 100),
    ],
)
def test_room_is_what_both_the_report_and_the_routers_own_count_leave(known: KvRoom, room: int) -> None:
    assert known.room == room


@pytest.mark.parametrize(
    ("rooms", "needed", "promised", "has"),
    [
        ((), 1, 0, False),
        ((10,), 10, 0, True),
        ((10,), 11, 0, False),
        ((10,), 10, 1, False),
        ((10, 10), 10, 10, True),
        ((6, 6), 10, 0, False),
        ((10, -50), 10, 0, True),
    ],
)
def test_an_answer_fits_into_one_instance_beside_what_is_promised(
    rooms: tuple[int, ...], needed: int, promised: int, has: bool
) -> None:
    assert has_room(rooms, needed, promised) is has
