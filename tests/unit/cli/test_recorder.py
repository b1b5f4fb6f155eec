"""``triptych workload record`` against an admin port whose answers are given."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.command_line import invoke
from triptych.cli.outcome import CliError
from triptych.cli.recorder import Job, record
from triptych.runtime import admin
from triptych.workload.requests import TEMPLATE_TOKENS

pytestmark = pytest.mark.slow  # routers are asked each second

CHAT = {
    "came_s": 0.0,
    "outcome": "done",
    "tenant": "alice",
    "prompt_tokens": 200 + TEMPLATE_TOKENS,
    "item_tokens": 80,
    "output_tokens": 30,
    "choices": 1,
    "images": [[640, 480]],
    "videos": [],
    "sounds_s": [],
}
LONG_AGO = CHAT | {"came_s": 100.0}


def answer(position: int, *requests: dict[str, Any], **others: Any) -> dict[str, Any]:
    usual = {"epoch": 1, "left": 0, "missed": 0, "refused": 0, "unprepared": 0, "running_for_s": []}
    return {**usual, "position": position, "requests": list(requests), **others}


class Router:
    """Gives one answer after the other, and the last one again and again. None is no answer."""

    def __init__(self, answers: Sequence[dict[str, Any] | Callable[[float], dict[str, Any]] | None]) -> None:
        """Answers may be made with the seconds since the first question."""
        self._answers = list(answers)
        self._first_s: float | None = None
        self.asked: list[str | None] = []
        self.all_given = asyncio.Event()

    async def requests(self, query: admin.Query) -> admin.Answer:
        now_s = asyncio.get_running_loop().time()
        self._first_s = now_s if self._first_s is None else self._first_s
        self.asked.append(query.get("after"))
        given = self._answers.pop(0)
        if callable(given):
            given = given(now_s - self._first_s)
        if not self._answers:
            self.all_given.set()
            self._answers = [given]
        if given is None:
            return admin.Answer.json(HTTPStatus.SERVICE_UNAVAILABLE, {})
        return admin.Answer.json(HTTPStatus.OK, given)


@asynccontextmanager
async def routers(*routers: Router) -> AsyncIterator[list[str]]:
    urls: list[str] = []
    async with asynccontextmanager(_serving)(list(routers), urls):
        yield urls


async def _serving(left: list[Router], urls: list[str]) -> AsyncIterator[None]:
    if not left:
        yield
        return
    async with admin.serve("127.0.0.1", 0, {"/requests": left[0].requests}) as port:
        urls.append(f"http://127.0.0.1:{port}")
        async with asynccontextmanager(_serving)(left[1:], urls):
            yield


async def recorded(
    out: Path, *given: Router, duration_s: float | None = None
) -> tuple[list[dict[str, Any]], str, bool]:
    """The lines, what was said, and whether nothing was missed. Without a duration, Ctrl-C comes after the last answer."""
    console = Console(file=io.StringIO(), width=400)
    async with routers(*given) as urls, asyncio.TaskGroup() as group:
        following = group.create_task(record(Job(out, "http://127.0.0.1:1", urls, duration_s), console))
        for router in given:
            await router.all_given.wait()
        if duration_s is None:
            following.cancel()
        whole = await following
    assert isinstance(console.file, io.StringIO)
    return lines_of(out), console.file.getvalue(), whole


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


async def test_sizes_lengths_and_times_are_written_and_tenants_are_numbered(tmp_path: Path) -> None:
    video = {"size": [64, 32], "seconds": 2.0, "frames": 20}
    rich = CHAT | {"tenant": "bob", "videos": [video], "sounds_s": [1.5], "outcome": "cancelled", "choices": 3}
    router = Router([answer(7), answer(9, CHAT, rich, left=1), answer(10, CHAT | {"tenant": ""}), answer(10)])
    lines, said, whole = await recorded(tmp_path / "a.jsonl", router)
    assert whole
    assert router.asked[:4] == [None, "7", "9", "10"]
    first, second, third = lines
    assert 0 <= first.pop("arrival_s") < 60
    assert first == {
        "text_tokens": 120,
        "output_tokens": 30,
        "images": ["640x480"],
        "tenant": "tenant-1",
        "outcome": "done",
    }
    assert second["videos"] == [{"size": "64x32", "seconds": 2.0, "frames_per_s": 10}]
    assert (second["sounds_s"], second["tenant"], second["output_tokens"]) == ([1.5], "tenant-2", 10)
    assert "tenant" not in third
    assert "3 requests are in " in said
    assert "(1 cancelled, 2 done)" in said
    assert "not in it" not in said


async def test_what_is_not_in_the_file_is_counted(tmp_path: Path) -> None:
    before = answer(5, refused=3, unprepared=1)
    router = Router(
        [before, answer(9, CHAT, LONG_AGO, missed=2, refused=7, unprepared=2), answer(9, refused=7, unprepared=2)]
    )
    lines, said, whole = await recorded(tmp_path / "a.jsonl", router)
    assert len(lines) == 1
    assert not whole
    assert (
        "not in it: 4 that were refused, 1 that failed or left before their sizes were known, 1 that had come" in said
    )
    assert "missed: 2 that a router no longer kept" in said


async def test_requests_that_run_at_the_end_are_waited_for(tmp_path: Path) -> None:
    """A request that came in the middle of the recorded time."""

    def runs(since_s: float) -> dict[str, Any]:
        return answer(0, running_for_s=[since_s - 1.5, 500.0])

    def ended(since_s: float) -> dict[str, Any]:
        return answer(1, CHAT | {"came_s": since_s - 1.5}, running_for_s=[500.0])

    router = Router([answer(0), *[runs] * 5, ended])
    lines, said, whole = await recorded(tmp_path / "a.jsonl", router, duration_s=3.0)
    assert whole
    assert len(lines) == 1
    assert "waiting for 1 requests that still run" in said


async def test_a_recording_that_is_interrupted_has_what_had_ended(tmp_path: Path) -> None:
    router, out = Router([answer(0), answer(1, CHAT), answer(1), answer(1)]), tmp_path / "a.jsonl"
    async with routers(router) as urls, asyncio.TaskGroup() as group:
        job = Job(out, "http://127.0.0.1:1", urls, 600.0)
        following = group.create_task(record(job, Console(file=io.StringIO())))
        await router.all_given.wait()
        assert len(lines_of(out)) == 1, "written as it goes"
        following.cancel()
    assert following.cancelled(), "so the command ends as interrupted"
    assert len(lines_of(out)) == 1


async def test_a_router_that_is_restarted_or_lost_is_named(tmp_path: Path) -> None:
    restarted = Router([answer(7), answer(3, CHAT, epoch=2), answer(1, CHAT, epoch=2), answer(1, epoch=2)])
    lost = Router([answer(0), None])
    lines, said, whole = await recorded(tmp_path / "a.jsonl", restarted, lost)
    assert not whole
    assert len(lines) == 1, "it is asked again from its beginning"
    assert restarted.asked[1:3] == ["7", "0"]
    assert "was restarted: what had ended there since the last look is missing" in said
    assert "no longer answers: what ended there since 1 s is missing" in said


async def test_a_recording_ends_when_no_router_is_left_and_says_so_at_once(tmp_path: Path) -> None:
    away, back = Router([answer(0), None, answer(1, CHAT), None]), Router([answer(0), answer(0), None])
    job = Job(tmp_path / "a.jsonl", "http://127.0.0.1:1", [], 600.0, patience_s=2.0)
    console = Console(file=io.StringIO(), width=400)
    assert isinstance(console.file, io.StringIO)
    async with routers(away, back) as urls:
        assert not await record(replace(job, admin=urls), console)
    first, *said = console.file.getvalue().splitlines()
    assert "recording the requests of" in first
    assert [line for line in said if "answer" in line][:5] == [
        f"the router at {urls[0]} does not answer; it is asked again",
        f"the router at {urls[0]} answers again",
        f"the router at {urls[1]} does not answer; it is asked again",
        f"the router at {urls[0]} does not answer; it is asked again",
        "no router has answered for 2 s: the recording ends",
    ]
    assert len(lines_of(job.out)) == 1
    assert sum("no longer answers" in line for line in said) == 2


async def test_what_is_no_router_is_refused(tmp_path: Path) -> None:
    async with admin.serve("127.0.0.1", 0, {}) as port:
        job = Job(tmp_path / "a.jsonl", "http://127.0.0.1:1", [f"http://127.0.0.1:{port}"], 1.0)
        with pytest.raises(CliError, match="it is not the admin port of a router"):
            await record(job, Console(file=io.StringIO()))
    assert not job.out.exists()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("full.jsonl", (), "full.jsonl exists: name another file, or remove it"),
        ("a.json", (), "name a file that ends in .jsonl"),
        ("full.jsonl/a.jsonl", (), "triptych: cannot write {out}: a file is where its directory would be"),
        ("a.jsonl", ("--admin", "nonsense"), "does not answer as the admin port of a router does"),
        ("a.jsonl", ("--url", "http://127.0.0.1:1"), "no router of a local cluster at http://127.0.0.1:1 is found"),
        ("a.jsonl", ("--duration", "0"), "--duration"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_recorded(
    tmp_path: Path, name: str, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "full.jsonl").write_text("{}\n")
    result = invoke(["workload", "record", str(tmp_path / name), *options])
    assert result.exit_code != 0
    assert message.format(out=tmp_path / name) in " ".join(result.output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["full.jsonl"]
