"""Cores that all processes of a host share: times by theory, and what services take of them."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.unit.sim.kit import (
    CONTROL_S,
    ENCODE_S,
    ENCODE_TOKEN_S,
    PREPARE_S,
    PROMPT_TOKEN_S,
    SEQUENCE_S,
    STEP_S,
    deployment,
)
from triptych.domain.stage import Role
from triptych.sim.host import BadHost, Cost, EncoderCosts, FrontCosts, Host, HostCores, TextCosts
from triptych.sim.run import simulate
from triptych.virtual import virtual_time
from triptych.virtual.offload import Kind
from triptych.workload.requests import TEMPLATE_TOKENS, Plan, Planned, Size

IMAGE = Size(224, 224)
IMAGE_TOKENS = 64
SLICES_S = 0.005
"""A few slices, by which theory of cores that are shared alike may be missed."""


def ends(host: Host, work: Callable[[HostCores], Coroutine[Any, Any, list[float]]]) -> list[float]:
    """When pieces of work were done."""

    async def main() -> list[float]:
        return await work(HostCores(host))

    return virtual_time.run(main())


def all_at_once(*costs_s: float) -> Callable[[HostCores], Coroutine[Any, Any, list[float]]]:
    async def work(cores: HostCores) -> list[float]:
        clock = asyncio.get_running_loop().time
        found = [0.0] * len(costs_s)

        async def piece(number: int, cost_s: float) -> None:
            await cores.run(cost_s)
            found[number] = clock()

        async with asyncio.TaskGroup() as group:
            for number, cost_s in enumerate(costs_s):
                group.create_task(piece(number, cost_s))
        return found

    return work


def test_two_pieces_on_one_core_take_twice_as_long() -> None:
    assert ends(Host(1.0), all_at_once(1.0, 1.0)) == pytest.approx([2.0, 2.0], abs=SLICES_S)


def test_two_pieces_on_two_cores_do_not_notice_each_other() -> None:
    assert ends(Host(2.0), all_at_once(1.0, 2.0)) == pytest.approx([1.0, 2.0])


def test_a_piece_never_has_more_than_one_core() -> None:
    assert ends(Host(8.0), all_at_once(1.0)) == pytest.approx([1.0])


def test_cores_are_shared_alike_until_one_piece_is_done() -> None:
    """Three on two cores progress at 2/3 of a core; when the shortest is done, the others have one each."""
    assert ends(Host(2.0), all_at_once(1.0, 2.0, 3.0)) == pytest.approx([1.5, 2.5, 3.5], abs=SLICES_S)


def test_short_work_waits_for_slices_of_long_work_and_no_longer() -> None:
    async def work(cores: HostCores) -> list[float]:
        clock, found = asyncio.get_running_loop().time, list[float]()
        cores.run(1.0)
        await asyncio.sleep(0.004)
        began_s = clock()
        await cores.run(0.001)
        found.append(clock() - began_s)
        cores.run(1.0)
        await cores.run(0.001)
        return [*found, clock() - began_s]

    first, behind = ends(Host(1.0, slice_s=0.01), work)
    assert first == pytest.approx(0.01 - 0.004 + 0.001), "what runs has had a part of its slice"
    assert behind == pytest.approx(first + 2 * 0.01 + 0.001), "both long pieces come first"


def test_a_part_of_a_core_may_be_taken() -> None:
    assert ends(Host(1.5), all_at_once(1.0, 1.0)) == pytest.approx([4 / 3, 4 / 3], abs=SLICES_S)


def at_once(*pieces: tuple[float, Kind]) -> Callable[[HostCores], Coroutine[Any, Any, list[float]]]:
    """When each of these is done, and then the CPU time of all."""

    async def work(cores: HostCores) -> list[float]:
        clock, found = asyncio.get_running_loop().time, [0.0] * len(pieces)

        async def piece(number: int, cost_s: float, kind: Kind) -> None:
            await cores.run(cost_s, kind)
            found[number] = clock()

        async with asyncio.TaskGroup() as group:
            for number, (cost_s, kind) in enumerate(pieces):
                group.create_task(piece(number, cost_s, kind))
        return [*found, cores.given_s]

    return work


def test_passes_and_decodes_slow_each_other_and_one_alone_is_not_slowed() -> None:
    """They make 0.8 and 0.9 of their work in a second; when the decode is done, the pass goes on at full speed. Its core counts as taken for
    longer.
    """
    host = Host(2.0, pass_speed=0.8, decode_speed=0.9)
    assert ends(host, at_once((1.8, Kind.PASS), (0.9, Kind.DECODE))) == pytest.approx([2.0, 1.0, 3.0])
    assert ends(host, at_once((1.0, Kind.PASS))) == pytest.approx([1.0, 1.0])


def test_messages_slow_passes_alone_and_work_of_one_kind_slows_nothing_by_default() -> None:
    host = Host(2.0, pass_speed=0.8, decode_speed=0.9)
    for kind in Kind:
        assert ends(host, at_once((1.0, kind), (1.0, kind))) == pytest.approx([1.0, 1.0, 2.0])
    assert ends(host, at_once((0.8, Kind.PASS), (1.0, Kind.OTHER))) == pytest.approx([1.0, 1.0, 2.0])
    assert ends(host, at_once((1.0, Kind.DECODE), (1.0, Kind.OTHER))) == pytest.approx([1.0, 1.0, 2.0])


def test_decodes_of_several_instances_slow_each_other() -> None:
    host = Host(2.0, decodes_speed=0.8)
    assert ends(host, at_once((0.8, Kind.DECODE), (1.0, Kind.DECODE))) == pytest.approx([1.0, 1.2, 2.2])
    assert ends(host, at_once((1.0, Kind.DECODE), (1.0, Kind.PASS))) == pytest.approx([1.0, 1.0, 2.0])


def test_each_core_that_decodes_slows_a_pass_as_much() -> None:
    host = Host(3.0, pass_speed=0.8)
    speeds = [host.speed(Kind.PASS, [Kind.DECODE] * number) for number in (0, 1, 2)]
    assert speeds == pytest.approx([1.0, 0.9, 0.8])
    assert Host(1.0, pass_speed=0.8).speed(Kind.PASS, []) == 1.0


def test_an_event_loop_does_one_thing_at_a_time_and_wakes_up_once() -> None:
    async def work(cores: HostCores) -> list[float]:
        clock, cost, found = asyncio.get_running_loop().time, Cost(1.0, 0.25), list[float]()
        pieces = [cores.run_in_loop("gateway", cost) for _ in range(3)]
        other = cores.run_in_loop("router", cost)
        for piece in (*pieces[:1], other, *pieces[1:]):
            await piece
            found.append(clock())
        await cores.run_in_loop("gateway", cost)
        return [*found, clock()]

    assert ends(Host(2.0), work) == pytest.approx([1.0, 1.0, 1.25, 1.5, 2.5])


def lone(host: Host | None, *requests: Planned, roles: dict[Role, int] | None = None) -> list[tuple[float, float]]:
    """TTFT and TPOT of each request."""
    cluster = deployment(roles or {Role.E: 1, Role.PD: 1}, host=host)
    outcome = simulate(cluster, Plan(requests, 10.0))
    return [(record.ttft_s or 0.0, record.tpot_s or 0.0) for record in outcome.records]


@pytest.mark.slow
def test_a_host_with_a_core_for_each_process_changes_nothing() -> None:
    request = Planned(1.0, 100, (IMAGE,), 11)
    [alone], [with_host] = lone(None, request), lone(Host(8.0), request)
    assert with_host == pytest.approx(alone, rel=1e-3)


@pytest.mark.slow
def test_engines_of_two_processes_on_one_core_take_turns() -> None:
    """Two long prompts at two instances: each has half of the core, as long as both compute."""
    prompt_s = STEP_S + PROMPT_TOKEN_S * (2000 + TEMPLATE_TOKENS)
    requests = [Planned(1.0, 2000, (), 1)] * 2
    apart = lone(Host(2.0), *requests, roles={Role.EPD: 2})
    shared = lone(Host(1.0), *requests, roles={Role.EPD: 2})
    calls_s = 4 * CONTROL_S
    assert [ttft_s for ttft_s, _ in apart] == pytest.approx([prompt_s + calls_s] * 2, rel=0.02)
    assert [ttft_s for ttft_s, _ in shared] == pytest.approx([2 * prompt_s + calls_s] * 2, rel=0.02)


@pytest.mark.slow
def test_services_take_their_time_on_the_way() -> None:
    front = FrontCosts(request=Cost(0.003), item=Cost(0.002), message=Cost(0.001), end=Cost(0.5), item_end=Cost(0.5))
    text = TextCosts(request=Cost(0.004), item=Cost(0.002), end=Cost(0.5), step_s=0.006, sequence_s=0.001)
    host = Host(
        8.0, client=front, gateway=front, router=front, text=text, encoder=EncoderCosts(item=Cost(0.02), end=Cost(0.5))
    )
    request = Planned(1.0, 100, (IMAGE,), 11)
    [(ttft_s, tpot_s)], [(with_ttft_s, with_tpot_s)] = lone(None, request), lone(host, request)
    on_the_way_s = 3 * (0.003 + 0.002) + 0.02 + (0.004 + 0.002) + (0.006 + 0.001) + 3 * 0.001
    assert with_ttft_s - ttft_s == pytest.approx(on_the_way_s, abs=5e-4)
    assert with_tpot_s - tpot_s == pytest.approx(0.007, abs=1e-4)
    assert tpot_s == pytest.approx(STEP_S + SEQUENCE_S, rel=0.02)


@pytest.mark.slow
def test_an_embedding_is_taken_in_while_an_answer_goes_on() -> None:
    answer, question = Planned(1.0, 100, (), 201), Planned(1.1, 8, (IMAGE,), 1)
    taking = TextCosts(item=Cost(0.3, 0.3))
    without, with_item = (
        dict(zip((201, 1), lone(Host(8.0, text=text), answer, question), strict=True)) for text in (TextCosts(), taking)
    )
    assert with_item[1][0] - without[1][0] == pytest.approx(0.3, abs=2 * STEP_S)
    assert with_item[201][1] == pytest.approx(without[201][1], rel=0.01)


@pytest.mark.slow
def test_both_instances_take_their_part_of_a_transfer_after_the_first_token() -> None:
    request, roles = Planned(1.0, 100, (), 11), {Role.P: 1, Role.D: 1}
    text = TextCosts(export=Cost(0.03), transfer=Cost(0.02), transfer_end=Cost(0.5))
    [(ttft_s, tpot_s)], [(with_ttft_s, with_tpot_s)] = (
        lone(host, request, roles=roles) for host in (Host(8.0), Host(8.0, text=text))
    )
    assert with_ttft_s == pytest.approx(ttft_s, abs=1e-4)
    assert 10 * (with_tpot_s - tpot_s) == pytest.approx(0.03 + 0.02, abs=1e-3)


@pytest.mark.slow
def test_a_prompt_waits_for_the_transfer_of_the_one_before() -> None:
    first, second = Planned(1.0, 100, (), 2), Planned(1.1, 100, (), 1)
    without, exporting = (
        lone(Host(8.0, text=TextCosts(export=Cost(cost_s))), first, second, roles={Role.P: 1, Role.D: 1})
        for cost_s in (0.0, 0.3)
    )
    first_token_s = 1.0 + max(ttft_s for ttft_s, _ in without)
    assert max(ttft_s for ttft_s, _ in exporting) == pytest.approx(first_token_s + 0.3 - 1.1 + STEP_S, abs=0.02)


@pytest.mark.slow
def test_preparation_and_encoding_share_the_cores_with_text() -> None:
    """While one core computes a long prompt, an image beside it takes twice as long."""
    image_s = PREPARE_S + ENCODE_S + ENCODE_TOKEN_S * IMAGE_TOKENS
    requests = [Planned(1.0, 4000, (), 1), Planned(1.0, 8, (IMAGE,), 1)]
    for cores, times in ((1.0, 2), (2.0, 1)):
        outcome = simulate(deployment({Role.E: 1, Role.PD: 1}, host=Host(cores)), Plan(requests, 5.0))
        timeline = outcome.timelines[1]
        assert timeline is not None
        assert timeline.encode_s == pytest.approx(times * image_s + 2 * CONTROL_S, rel=0.03)


def test_a_host_is_read_from_a_document() -> None:
    document = {"cores": 2, "gateway": {"request": [0.002, 0.001]}, "text": {"step_s": 0.0005}}
    host = Host.parse(document)
    assert host == Host(2.0, gateway=FrontCosts(request=Cost(0.002, 0.001)), text=TextCosts(step_s=0.0005))


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({}, "cores is missing"),
        ({"cores": 0}, "cores is missing"),
        ({"cores": 2, "slice_s": 0}, "slice_s is not above 0"),
        ({"cores": 2, "pass_speed": 0}, "pass_speed is not above 0"),
        ({"cores": 2, "decode_speed": 1.1}, "decode_speed is not above 0 and at most 1"),
        ({"cores": 2, "decodes_speed": 0}, "decodes_speed is not above 0"),
        ({"cores": "2"}, "cores is not a number"),
        ({"cores": 2, "core": 1}, "there is no core; there are client, cores"),
        ({"cores": 2, "router": 1}, "router is not a table"),
        ({"cores": 2, "router": {"step_s": 1}}, "there is no router.step_s; there are end"),
        ({"cores": 2, "router": {"item": 1}}, r"router.item is not \[alone, together\]"),
        ({"cores": 2, "router": {"item": [0.1, -1]}}, "router.item is not a number from 0 on"),
    ],
)
def test_a_document_that_says_something_else_is_refused(document: dict[str, Any], fault: str) -> None:
    with pytest.raises(BadHost, match=fault):
        Host.parse(document)
