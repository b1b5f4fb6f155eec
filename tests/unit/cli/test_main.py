"""The command as people use it, against a gateway with a router that says what it is told."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest
from typer.testing import CliRunner

from services.gateway.app import serve
from services.gateway.settings import GatewaySettings
from tests.unit.services.gateway.fakes import HELLO, FakeRouter, Step
from triptych.cli.main import app
from triptych.domain.generation import TokenChunk
from triptych.errors import InstanceLost, InvalidMedia, Overloaded


class Stub:
    """A gateway on a loop of its own."""

    def __init__(self) -> None:
        self.router: FakeRouter | None = None
        self.url = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self.router = FakeRouter()
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        async with serve(GatewaySettings(port=0), self.router) as running:
            self.url = f"http://127.0.0.1:{running.port}"
            self._up.set()
            await self._stop.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def says(self, script: Sequence[Step]) -> None:
        assert self.router is not None
        self.router.script = script


@pytest.fixture(scope="module")
def shared_gateway() -> Iterator[Stub]:
    with Stub() as stub:
        yield stub


@pytest.fixture
def gateway(shared_gateway: Stub) -> Stub:
    shared_gateway.says(HELLO)
    return shared_gateway


def triptych(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_version_is_the_packages() -> None:
    code, out, _ = triptych("--version")
    assert (code, out) == (0, "triptych 0.1.0\n")


@pytest.mark.parametrize("command", [(), ("up",), ("chat",)])
def test_help_teaches_by_example(command: tuple[str, ...]) -> None:
    code, out, _ = triptych(*command, "--help")
    assert code == 0
    assert "triptych up" in out or "triptych chat" in out


def test_chat_prints_the_answer_and_where_it_was_made(gateway: Stub, tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(b"pixels")
    code, out, err = triptych("chat", "What?", "--image", image, "--url", gateway.url, "--max-tokens", 7)
    assert (code, err) == (0, "")
    assert out.startswith("Hello\n")
    for said in ("encoder-1", "memory", "4,096", "text-1", "56x56"):
        assert said in out
    assert gateway.router is not None
    request = gateway.router.requests[-1]
    assert request.media[0].data == b"pixels"
    assert (request.model, request.sampling.max_tokens, request.sampling.temperature) == ("demo", 7, 0.0)


def test_chat_can_leave_the_timeline_out(gateway: Stub) -> None:
    assert triptych("chat", "Hi", "--url", gateway.url, "--no-timeline") == (0, "Hello\n", "")


def test_answers_cannot_steer_the_terminal(gateway: Stub) -> None:
    gateway.says([TokenChunk((1,), "a\x1b[2Jb\x9b[bold]"), HELLO[-1]])
    assert triptych("chat", "Hi", "--url", gateway.url, "--no-timeline")[1] == "a[2Jb[bold]\n"


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ([InvalidMedia("image 1 is not an image")], 2, "400: image 1 is not an image"),
        ([Overloaded("full")], 2, "429: full"),
        ([InstanceLost("text-1 is gone")], 1, "503: text-1 is gone"),
        ([TokenChunk((1,), "x"), InstanceLost("text-1 is gone")], 1, "the answer broke off: text-1 is gone"),
    ],
)
def test_what_the_server_refuses_is_one_line(gateway: Stub, script: list[Step], code: int, said: str) -> None:
    gateway.says(script)
    assert triptych("chat", "Hi", "--url", gateway.url)[::2] == (code, f"triptych: {said}\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--image", "/nowhere.png"], 2, "does not exist"),
        (["--image", "/"], 2, "is a directory"),
        (["--max-tokens", "0"], 2, "--max-tokens"),
        (["--url", "http://127.0.0.1:1"], 1, "nothing answers at http://127.0.0.1:1"),
        (["--url", "ftp://127.0.0.1"], 2, "not a URL that starts with http"),
        (["--url", "http://127.0.0.1:x"], 2, "is not a URL"),
    ],
)
def test_mistakes_are_one_clear_message(arguments: list[str], code: int, said: str) -> None:
    got, out, err = triptych("chat", "Hi", *arguments)
    assert (got, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_up_refuses_what_is_no_model(tmp_path: Path) -> None:
    code, _, err = triptych("up", "--model", tmp_path)
    assert code == 1
    assert "there is no config.json in it" in err
