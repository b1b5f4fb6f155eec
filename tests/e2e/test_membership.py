"""Processes join and leave a running router by its watched file."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.client import Streamed, stream
from tests.e2e.reference import Question, answer, questions
from triptych.cli import ports
from triptych.cli.cluster import LocalCluster
from triptych.cli.metrics import scrape
from triptych.demo import MODEL_DIR
from triptych.rpc.stubs import RouterStub

pytestmark = pytest.mark.extended


def write(path: Path, addresses: Iterable[str]) -> None:
    text = "".join(f'[[instances]]\naddress = "{address}"\n' for address in addresses)
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


@contextlib.contextmanager
def watching_router(path: Path, port: int, admin_port: int, log: Path) -> Iterator[None]:
    told = ("--instances-file", str(path), "--instances-poll-s", "0.1", "--model", str(MODEL_DIR))
    command = (
        sys.executable,
        "-m",
        "triptych.services.router",
        *told,
        "--port",
        str(port),
        "--admin-port",
        str(admin_port),
    )
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(240) == 0


async def instances(client: httpx.AsyncClient, admin: str) -> dict[str, float]:
    """Numbers of instances of the router by role, and the state of its membership source."""
    samples = await scrape(client, admin)
    if samples is None:
        return {}
    roles = {role: samples.total("triptych_instances", role=role, state="ready") or 0 for role in ("E", "PD")}
    return {
        **roles,
        "all": samples.total("triptych_instances") or 0,
        "stale": samples.total("triptych_membership_stale") or 0,
    }


async def until(client: httpx.AsyncClient, admin: str, **wanted: float) -> None:
    async with asyncio.timeout(240):
        while not wanted.items() <= (await instances(client, admin)).items():  # noqa: ASYNC110 - asked over HTTP
            await asyncio.sleep(0.1)


async def test_processes_join_and_leave_by_the_watched_file_without_lost_answers(tmp_path: Path) -> None:
    port, admin_port = ports.free(2, ())
    path, admin = tmp_path / "instances.toml", f"http://{ports.address(admin_port)}"
    async with LocalCluster(roles="E:2,PD:2") as cluster, httpx.AsyncClient(trust_env=False) as http:
        first = [cluster.targets["encoder-1"], cluster.targets["text-1"]]
        second = [cluster.targets["encoder-2"], cluster.targets["text-2"]]
        write(path, first)
        with watching_router(path, port, admin_port, tmp_path / "router.log"):
            await until(http, admin, E=1, PD=1, all=2)
            router = RouterStub(ports.address(port))
            asked = questions((1, 2, 4), 90)
            tasks: list[tuple[Question, asyncio.Task[Streamed]]] = []
            async with asyncio.TaskGroup() as group:

                async def ask(several: list[Question], name: str) -> None:
                    for number, question in enumerate(several):
                        call = group.create_task(stream(router, f"{name}-{number}", question))
                        tasks.append((question, call))
                        await asyncio.sleep(0.01)

                await ask(asked[:30], "before")
                write(path, [*first, *second])
                await until(http, admin, E=2, PD=2)
                await ask(asked[30:60], "both")
                write(path, second)
                await ask(asked[60:], "after")
                await until(http, admin, E=1, PD=1, all=2)
                for name in ("encoder-1", "text-1"):  # removed by the router, so that no request depends on them
                    cluster.kill(name)
            for question, task in tasks:
                assert task.result().text == answer(question).text
            path.write_text("[[instances]")
            await until(http, admin, stale=1, all=2)
            question = Question("What digits are shown?", ("9_c",))
            assert (await stream(router, "still", question)).text == answer(question).text
            await router.close()
    assert "is not TOML" in (tmp_path / "router.log").read_text()
