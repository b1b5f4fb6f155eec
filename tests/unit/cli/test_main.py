"""The command line, against a gateway with a scripted router."""

import asyncio
import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import pytest
from rich.console import Console

from tests.command_line import invoke
from tests.unit.cli.foreign_server import foreign_server
from tests.unit.services.gateway.fakes import HELLO, FakeRouter, Step
from triptych import demo
from triptych.cli import chat
from triptych.cli.chat import ChatSettings, Conversation
from triptych.cli.model import Model
from triptych.cli.outcome import ClusterError
from triptych.cli.rest import Attachment, RestError
from triptych.domain.chat import ChatRequest, TextPart
from triptych.domain.generation import ChatEvent, TokenChunk
from triptych.domain.media import Modality
from triptych.domain.timeline import Readiness
from triptych.errors import ContextTooLong, InstanceLost, InvalidMedia, Overloaded
from triptych.services.gateway import shedding
from triptych.services.gateway.app import serve
from triptych.services.gateway.settings import GatewaySettings


class Stub:
    """A gateway on its own event loop."""

    def __init__(self, router: FakeRouter | None = None) -> None:
        self.router = router
        self.url = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self.router = self.router or FakeRouter()
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        # A busy machine delays this loop, and then the gateway itself would refuse what follows a refusal.
        with mock.patch.object(shedding, "BEHIND_S", math.inf):
            async with serve(GatewaySettings(port=0), self.router) as running:
                self.url = f"http://127.0.0.1:{running.port}"
                self._up.set()
                await self._stop.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def plays(self, script: Sequence[Step]) -> None:
        assert self.router is not None
        self.router.script = script


@pytest.fixture(scope="module")
def shared_gateway() -> Iterator[Stub]:
    with Stub() as stub:
        yield stub


@pytest.fixture
def gateway(shared_gateway: Stub) -> Stub:
    shared_gateway.plays(HELLO)
    return shared_gateway


def triptych(*arguments: object) -> tuple[int, str, str]:
    result = invoke([str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_version_is_the_packages() -> None:
    code, out, _ = triptych("--version")
    assert (code, out) == (0, "triptych 0.1.0\n")


@pytest.mark.parametrize(
    "command",
    [
        (),
        ("up",),
        ("serve",),
        ("chat",),
        ("status",),
        ("scale",),
        ("drain",),
        ("switch",),
        ("limits",),
        ("roll",),
        ("bench",),
        ("profile",),
    ],
)
def test_help_has_examples(command: tuple[str, ...]) -> None:
    code, out, _ = triptych(*command, "--help")
    assert code == 0
    assert f"triptych {command[0] if command else 'up'}" in out


def test_chat_prints_the_answer_and_its_timeline(gateway: Stub, tmp_path: Path) -> None:
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


def test_chat_can_omit_the_timeline(gateway: Stub) -> None:
    assert triptych("chat", "Hi", "--url", gateway.url, "--no-timeline") == (0, "Hello\n", "")


def test_control_characters_of_an_answer_do_not_reach_the_terminal(gateway: Stub) -> None:
    gateway.plays([TokenChunk((1,), "a\x1b[2Jb\x9b[bold]"), HELLO[-1]])
    assert triptych("chat", "Hi", "--url", gateway.url, "--no-timeline")[1] == "a[2Jb[bold]\n"


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ([InvalidMedia("image 1 is not an image")], 2, "400: image 1 is not an image"),
        ([Overloaded("full")], 2, "429: full"),
        ([InstanceLost("text-1 is gone")], 1, "503: text-1 is gone"),
        ([TokenChunk((1,), "x"), InstanceLost("text-1 is gone")], 1, "the answer was aborted: text-1 is gone"),
    ],
)
def test_an_error_of_the_server_is_one_line(gateway: Stub, script: list[Step], code: int, said: str) -> None:
    gateway.plays(script)
    assert triptych("chat", "Hi", "--url", gateway.url)[::2] == (code, f"triptych: {said}\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--image", "/nowhere.png"], 2, "does not exist"),
        (["--image", "/"], 2, "is a directory"),
        (["--image", "/dev/zero"], 2, "/dev/zero is a device, a pipe or a socket"),
        (["--video", "/dev/zero"], 2, "/dev/zero is a device, a pipe or a socket"),
        (["-i", "http://127.0.0.1/a.png"], 2, "http://127.0.0.1/a.png is not a file: only files of this machine"),
        (["--max-tokens", "0"], 2, "--max-tokens"),
        (["--url", "http://127.0.0.1:1"], 1, "nothing answers at http://127.0.0.1:1"),
        (["--url", "ftp://127.0.0.1"], 2, "not a URL that starts with http"),
        (["--url", "http://127.0.0.1:x"], 2, "is not a URL"),
    ],
)
def test_a_usage_error_is_one_clear_message(arguments: list[str], code: int, said: str) -> None:
    got, out, err = triptych("chat", "Hi", *arguments)
    assert (got, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_a_pipe_is_refused_as_an_image(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    code, _, err = triptych("chat", "Hi", "-i", tmp_path / "pipe")
    assert (code, err) == (2, f"triptych: {tmp_path}/pipe is a device, a pipe or a socket, not a regular file\n")


@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_question_is_not_asked(gateway: Stub, question: str) -> None:
    code, _, err = triptych("chat", question, "--url", gateway.url)
    assert (code, err) == (2, "triptych: the question is empty; leave it out to start a conversation\n")


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        *((status, b"<html>Hello</html>") for status in (200, 302, 404, 500, 503)),
        (200, b"\xff\xfe\x00"),
        (200, b"[1, 2]"),
        (200, b'"x"'),
        (200, b"{}"),
        (503, b'{"error": 1}'),
        (200, b'{"data": 1, "ready": 1, "missing": 1, "instances": 1}'),
    ],
)
@pytest.mark.parametrize(
    "command",
    [("chat", "Hi"), ("chat", "Hi", "--model", "m"), ("status",), ("bench", "--rate", "5", "--duration", "0.1")],
)
def test_an_answer_of_a_foreign_server_is_one_line(command: tuple[str, ...], answer: bytes, status: int) -> None:
    with foreign_server(answer, status) as port:
        code, _, err = triptych(*command, "--url", f"http://127.0.0.1:{port}")
    assert code == 1
    assert err.startswith("triptych: ")
    assert err.count("\n") == 1
    assert f"127.0.0.1:{port}" in err


@pytest.mark.parametrize(
    "stream",
    [b"data: {}\n\n", b"data: x\n\n", b'data: {"choices": [1]}\n\n', b"data: []\n\n", b"data: [DONE]\n\n", b""],
)
def test_a_malformed_stream_is_one_line(stream: bytes) -> None:
    with foreign_server(stream, kind="text/event-stream") as port:
        url = f"http://127.0.0.1:{port}"
        code, _, err = triptych("chat", "Hi", "--model", "m", "--url", url)
        assert code == 1
        assert err.count("\n") == 1
        code, out, _ = triptych("bench", "--rate", 5, "--duration", 0.3, "--images", 0, "--model", "m", "--url", url)
        assert (code, "0 answered" in out) == (1, True)


def test_a_server_without_http_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_say_nonsense, args=(server, 2))
        thread.start()
        for command in (("status",), ("bench", "--rate", "1")):
            code, _, err = triptych(*command, "--url", f"http://127.0.0.1:{server.getsockname()[1]}")
            assert code == 1
            assert err.count("\n") == 1
        thread.join()


def _say_nonsense(server: socket.socket, times: int) -> None:
    for _ in range(times):
        connection, _ = server.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_the_url_may_end_in_v1(gateway: Stub, ending: str) -> None:
    url = gateway.url + ending
    assert triptych("chat", "Hi", "--url", url)[0] == 0
    assert triptych("status", "--url", url)[0] == 0
    assert triptych("bench", "--rate", 5, "--duration", 0.1, "--images", 0, "--url", url)[0] == 0


def test_a_bad_image_is_named_by_its_file(gateway: Stub, tmp_path: Path) -> None:
    images = [tmp_path / "a.png", tmp_path / "b c.png"]
    for image in images:
        image.write_bytes(b"pixels")
    param = "messages[0].content[1]"
    gateway.plays([InvalidMedia(f"{param}: it is no image", param=param)])
    code, _, err = triptych("chat", "What?", "-i", images[0], "-i", images[1], "--url", gateway.url)
    assert (code, err) == (2, f"triptych: {images[1]}: 400: it is no image\n")


@pytest.mark.parametrize("param", ["messages[9].content[0]", "messages[0].content[7]", "messages[0].content", "stop"])
def test_an_error_without_an_image_is_printed_unchanged(gateway: Stub, param: str) -> None:
    gateway.plays([InvalidMedia("it is wrong", param=param)])
    assert triptych("chat", "What?", "--url", gateway.url)[2] == "triptych: 400: it is wrong\n"


def test_a_bad_image_of_an_earlier_turn_is_named(gateway: Stub, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    asking = ChatSettings(gateway.url, show_timeline=False)
    said = StringIO()

    async def talk() -> None:
        async with asking.client() as client:
            conversation = Conversation(client, asking, Console(file=said), [Attachment(tmp_path / "a.png")])
            await conversation.take("What?")
            gateway.plays([InvalidMedia("it is no image", param="messages[0].content[0]")])
            await conversation.take("And now?")

    with pytest.raises(RestError, match=r"a\.png: 400: it is no image"):
        asyncio.run(talk())


@pytest.mark.parametrize("key", ["schlüssel", "a\nb", "a\x00"])
def test_a_key_invalid_in_a_header_is_one_line(gateway: Stub, key: str) -> None:
    for command in (("status",), ("chat", "Hi"), ("bench", "--rate", 1)):
        code, _, err = triptych(*command, "--url", gateway.url, "--api-key", key)
        assert (code, err) == (2, "triptych: the API key has characters that are not allowed in a header\n")


@pytest.mark.parametrize(
    "name", ["TRIPTYCH_ROUTER_TLS_CERT", "TRIPTYCH_POOL_MANAGER_TLS_NAME", "TRIPTYCH_GATEWAY_REST_TLS_KEY"]
)
def test_up_refuses_services_with_tls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_POOL_MANAGER_REDIS_TLS", "true")  # its own matter
    monkeypatch.setenv("TRIPTYCH_TLS_CERT", "user.pem")  # for the command itself
    monkeypatch.setenv(name, "x")
    code, _, err = triptych("up")
    assert code == 2
    assert err.strip().endswith(f"a local cluster runs without TLS, on the loopback address: unset {name}")


def test_up_refuses_a_directory_without_a_model(tmp_path: Path) -> None:
    code, _, err = triptych("up", "--model", tmp_path)
    assert code == 1
    assert "there is no config.json in it" in err


def test_up_downloads_a_hub_model_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def snapshot_download(repository: str, **options: Any) -> str:
        fetched.append(f"{repository} at {options['revision']}")
        return str(demo.MODEL_DIR)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    monkeypatch.chdir(tmp_path)
    assert Model.named("someone/their-model@v1") == Model(demo.MODEL_DIR, "someone/their-model")
    assert fetched == ["someone/their-model at v1"]
    with pytest.raises(ClusterError, match="neither a local directory nor the name of a repository"):
        Model.named("not-there")


# --- conversations ----------------------------------------------------------------------------------------------------


def converse(gateway: Stub, *lines: str, arguments: Sequence[object] = ()) -> tuple[int, str, str]:
    command = ["chat", "--url", gateway.url, *map(str, arguments)]
    result = invoke(command, input="".join(f"{line}\n" for line in lines))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def last_request(gateway: Stub) -> ChatRequest:
    assert gateway.router is not None
    return gateway.router.requests[-1]


def test_a_conversation_sends_its_earlier_turns(gateway: Stub, tmp_path: Path) -> None:
    (tmp_path / "an image.png").write_bytes(b"pixels")
    code, out, err = converse(gateway, f'/image "{tmp_path}/an image.png"', "What?", "", "And now?", "/quit", "never")
    assert (code, err) == (0, "")
    assert out.count("Hello") == 2
    request = last_request(gateway)
    assert [message.role for message in request.messages] == ["user", "assistant", "user"]
    assert [part.data for part in request.media] == [b"pixels"]
    assert request.messages[1].parts == (TextPart("Hello"),)
    assert request.messages[2].parts == (TextPart("And now?"),), "an image is shown once"


def test_videos_and_audio_are_sent_with_their_modality(gateway: Stub, tmp_path: Path) -> None:
    for name in ("a.mp4", "b.wav", "c.mov"):
        (tmp_path / name).write_bytes(name.encode())
    arguments = ["--video", tmp_path / "a.mp4", "--audio", tmp_path / "b.wav"]
    code, _, err = triptych("chat", "What?", "--url", gateway.url, *arguments)
    assert (code, err) == (0, "")
    clips = [(Modality.VIDEO, b"a.mp4"), (Modality.AUDIO, b"b.wav")]
    assert [(part.modality, part.data) for part in last_request(gateway).media] == clips
    converse(gateway, f"/audio {tmp_path}/b.wav", f"/video {tmp_path}/c.mov", "And now?", arguments=arguments)
    clips += [(Modality.AUDIO, b"b.wav"), (Modality.VIDEO, b"c.mov")]
    assert [(part.modality, part.data) for part in last_request(gateway).media] == clips


def test_a_conversation_can_be_reset_and_ends_with_the_input(gateway: Stub, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    code, _, _ = converse(gateway, "One", "/clear", "Two", arguments=["-i", tmp_path / "a.png"])
    assert code == 0
    assert [message.parts for message in last_request(gateway).messages] == [(TextPart("Two"),)]


def test_a_conversation_shows_the_timeline_of_its_last_answer(gateway: Stub) -> None:
    _, out, _ = converse(gateway, "/timeline", "Hi", "/timeline", "/help")
    assert "there is no answer yet" in out
    assert "encoder-1" in out
    assert "/image PATH" in out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/nope", "unknown command /nope"),
        ("/image", "a path is missing"),
        ("/image /nowhere.png", "/nowhere.png does not exist"),
        ("/image /dev/zero", "/dev/zero is a device, a pipe or a socket"),
        ("/audio https://127.0.0.1/a.wav", "only files of this machine are taken"),
        ('/image "a', "No closing quotation"),
    ],
)
def test_an_invalid_command_does_not_end_a_conversation(gateway: Stub, line: str, said: str) -> None:
    code, out, _ = converse(gateway, line, "Hi")
    assert code == 0
    assert said in out
    assert "Hello" in out


def test_a_failed_turn_does_not_change_the_conversation(gateway: Stub) -> None:
    gateway.plays([Overloaded("full")])
    code, out, _ = converse(gateway, "One", "Two")
    assert code == 0
    assert out.count("429: full") == 2
    assert len(last_request(gateway).messages) == 1


class RefusesImages(FakeRouter):
    async def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        self.requests.append(request)
        if request.media:
            raise InvalidMedia("it is no image", param="messages[0].content[0]")
        yield HELLO


def test_a_refused_image_is_removed_from_the_conversation(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    with Stub(RefusesImages()) as gateway:
        code, out, _ = converse(gateway, f"/image {tmp_path}/a.png", "What?", "And now?")
        assert code == 0
        assert (
            f"{tmp_path}/a.png: 400: it is no image (your line and its files are not part of the conversation)" in out
        )
        assert out.count("Hello") == 1
        assert [message.parts for message in last_request(gateway).messages] == [(TextPart("And now?"),)]


def test_attached_files_are_kept_after_an_overload_error(gateway: Stub, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    gateway.plays([Overloaded("full")])
    converse(gateway, f"/image {tmp_path}/a.png", "What?", "What?")
    assert [part.data for part in last_request(gateway).media] == [b"pixels"]


def test_a_deleted_file_is_reported_once(gateway: Stub, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    lines = iter([f"/image {tmp_path}/a.png", "What?", "And now?"])
    said = StringIO()

    def read(_: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        if line == "What?":
            (tmp_path / "a.png").unlink()
        return line

    chat.converse(ChatSettings(gateway.url, show_timeline=False), [], Console(file=said), read)
    assert said.getvalue().count("a.png does not exist") == 1
    assert "Hello" in said.getvalue()


def test_a_full_context_explains_how_to_reset(gateway: Stub) -> None:
    gateway.plays([ContextTooLong("the prompt has 600 tokens, the model's context is 512")])
    _, out, _ = converse(gateway, "What?")
    assert "/clear begins a new one" in out


def test_a_conversation_without_a_server_does_not_start() -> None:
    code, _, err = triptych("chat", "--url", "http://127.0.0.1:1")
    assert code == 1
    assert "nothing answers" in err


# --- status -----------------------------------------------------------------------------------------------------------


def test_status_lists_the_instances(gateway: Stub) -> None:
    code, out, _ = triptych("status", "--url", gateway.url)
    assert code == 0
    for said in (f"{gateway.url}  ready", "models     demo", "instance   encoder-1", "instance   text-1"):
        assert said in out


def test_status_can_print_json(gateway: Stub) -> None:
    assert gateway.router is not None
    code, out, _ = triptych("status", "--url", gateway.url, "--json", "--admin", "http://127.0.0.1:1")
    assert code == 0
    document = json.loads(out)
    assert (document["ready"], document["models"], document["load"]) == (True, ["demo"], {})
    gateway.router.readiness_answer = Readiness(ready=False, missing=("encoder",))
    try:
        code, out, _ = triptych("status", "--url", gateway.url, "--admin", "http://127.0.0.1:1")
    finally:
        gateway.router.readiness_answer = Readiness(ready=True, instances=("encoder-1", "text-1"))
    assert code == 1
    assert "not ready: no encoder" in out
    assert re.search(r"http://127.0.0.1:1 +does not answer", out)


def test_status_names_the_missing_instances(gateway: Stub) -> None:
    assert gateway.router is not None
    gateway.router.readiness_answer = Readiness(ready=False, missing=("encode", "prefill", "decode"))
    try:
        code, out, _ = triptych("status", "--url", gateway.url)
    finally:
        gateway.router.readiness_answer = Readiness(ready=True, instances=("encoder-1", "text-1"))
    assert code == 1
    assert "not ready: no encoder, no text instance\n" in out


def test_the_address_may_come_from_the_environment(gateway: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_URL", gateway.url)
    assert triptych("status")[0] == 0


# --- bench ------------------------------------------------------------------------------------------------------------


def test_bench_loads_an_endpoint_and_reports(gateway: Stub, tmp_path: Path) -> None:
    out_file, picture = tmp_path / "build" / "bench" / "out.json", tmp_path / "plots" / "out.png"
    options = ["--rate", 20, "--duration", 0.5, "--images", "1:1,2:1", "--image-size", "8x8", "--slo-ttft-ms", 5000]
    code, out, err = triptych("bench", "--url", gateway.url, *options, "--json", out_file, "--plot", picture)
    assert (code, err) == (0, "")
    assert "attainment" in out
    assert "100.0%" in out
    document = json.loads(out_file.read_text())
    (run,) = document["runs"]
    assert run["report"]["answered"] == run["report"]["requests"] == len(run["requests"])
    assert {entry["tokens"] for entry in run["requests"]} == {3}
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("pace", [("--rate", 20), ("--sweep", "20,30")])
def test_an_interrupted_bench_reports_the_finished_requests(
    pace: tuple[object, ...], gateway: Stub, tmp_path: Path
) -> None:
    out_file = tmp_path / "out.json"
    assert gateway.router is not None
    asked, is_over = gateway.router.requests, threading.Event()
    enough = len(asked) + 10

    def interrupt() -> None:
        while not is_over.wait(0.05):
            if len(asked) >= enough:  # of those before the last, some have ended
                os.kill(os.getpid(), signal.SIGINT)
                return

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    stop = threading.Thread(target=interrupt)
    stop.start()
    try:
        options = [*pace, "--duration", 60, "--images", 0, "--json", out_file]
        code, out, err = triptych("bench", "--url", gateway.url, *options)
    finally:
        is_over.set()
        stop.join()
        signal.signal(signal.SIGINT, before)
    assert (code, err) == (130, "")
    assert re.search(r"interrupted: \d+ of \d{4} requests had ended", out)
    (run,) = json.loads(out_file.read_text())["runs"]
    assert run["report"]["answered"] == len(run["requests"]) > 0
    assert "TTFT" in out.upper()


def test_bench_finds_the_goodput_of_a_sweep(gateway: Stub) -> None:
    options = ["--sweep", "5,10", "--duration", 0.4, "--images", 0, "--slo-ttft-ms", 5000, "--slo-tpot-ms", 5000]
    options += ["--burstiness", 0]
    code, out, _ = triptych("bench", "--url", gateway.url, *options)
    assert code == 0
    assert "goodput 10 requests/s" in out


def test_a_bench_that_cannot_keep_up_reports_it(gateway: Stub, tmp_path: Path) -> None:
    options = ["--rate", 1000, "--duration", 0.1, "--images", 0, "--max-in-flight", 1, "--json", tmp_path / "out.json"]
    code, out, _ = triptych("bench", "--url", gateway.url, *options)
    assert code == 1
    assert re.search(r"offered +\S+\* req/s", out)
    assert "the generator did not keep up with" in out
    assert json.loads((tmp_path / "out.json").read_text())["runs"][0]["report"]["kept_up"] is False


def test_bench_replays_a_trace(gateway: Stub, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
        "2024-10-15T12:00:05.000Z,1,949,126\n2024-10-15T12:00:05.200Z,0,5,8\n"
    )
    code, out, _ = triptych("bench", "--url", gateway.url, "--trace", path, "--image-size", "8x8")
    assert code == 0
    assert "2 answered" in out
    assert last_request(gateway).sampling.max_tokens in (126, 8)


@pytest.mark.parametrize("model", [(), ("--model", "m")])
def test_every_command_explains_a_missing_key(model: tuple[str, ...]) -> None:
    answer = b'{"error": {"message": "no API key was given", "code": "invalid_api_key"}}'
    with foreign_server(answer, 401, "application/json") as port:
        for command in (("chat", "Hi", *model), ("bench", "--rate", "1", *model)):
            code, _, err = triptych(*command, "--url", f"http://127.0.0.1:{port}")
            assert (code, err) == (
                2,
                "triptych: 401: no API key was given; give a key with --api-key or TRIPTYCH_API_KEY\n",
            )


def test_bench_refuses_a_model_that_is_not_served(gateway: Stub) -> None:
    code, out, err = triptych("bench", "--rate", 1, "--model", "nope", "--url", gateway.url)
    assert (code, out) == (2, "")
    assert err == f"triptych: {gateway.url} does not serve 'nope'; it serves demo\n"


def test_bench_reports_failed_requests(gateway: Stub) -> None:
    gateway.plays([Overloaded("full")])
    code, out, _ = triptych("bench", "--url", gateway.url, "--rate", 20, "--duration", 0.3, "--images", 0)
    assert code == 1
    assert "HTTP 429" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "--rate 2"),
        (["--rate", "1", "--sweep", "1,2"], 2, "exclude each other"),
        (["--sweep", "1,x"], 2, "positive rates"),
        (["--sweep", "0"], 2, "positive rates"),
        (["--rate", "nan"], 2, "--rate"),
        (["--rate", "inf"], 2, "less than or equal to 1000000"),
        (["--rate", "1", "--duration", "inf"], 2, "less than or equal to 604800"),
        (["--rate", "1", "--duration", "nan"], 2, "--duration"),
        (["--rate", "1e5"], 2, "more than 1,000,000 requests"),
        (["--sweep", ""], 2, "positive rates"),
        (["--rate", "1", "--images", "nan"], 2, "is not VALUE"),
        (["--rate", "1", "--images", "1:nan"], 2, "is not a number"),
        (["--rate", "1", "--image-size", "0x0"], 2, "a side has"),
        (["--rate", "1", "--json", "/"], 2, "is a directory"),
        (["--rate", "1", "--timeout", "nan"], 2, "--timeout"),
        (["--trace", "/dev/null", "--rate", "1"], 2, "null"),
        (["--trace", "/proc", "--rate", "1"], 2, "it is not a ServeGen workload"),
        (["--rate", "1", "--images", "many"], 2, "is not VALUE"),
        (["--rate", "1", "--image-size", "8"], 2, "is not a size"),
        (["--rate", "1", "--json", "/dev/null/a.json"], 2, "cannot write /dev/null/a.json: a file is where"),
        (["--rate", "1", "--plot", "/dev/null/b/a.png"], 2, "cannot write /dev/null/b/a.png: a file is where"),
        (["--rate", "1", "--plot", "a.pdf"], 2, "name one that ends in .png"),
        (["--trace", "/nowhere"], 2, "does not exist"),
        (["--rate", "1", "--url", "http://127.0.0.1:1"], 1, "nothing answers"),
    ],
)
def test_invalid_bench_options_are_refused_before_the_start(arguments: list[str], code: int, said: str) -> None:
    got, out, err = triptych("bench", *arguments)
    assert (got, out) == (code, "")
    assert said in err.replace("\n", " ")
    assert "Traceback" not in err


# --- starting ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_help_imports_no_slow_module() -> None:
    script = (
        "import sys, triptych.cli.main\n"
        "print([name for name in ('httpx', 'grpc', 'pydantic', 'torch', 'rich.console', 'matplotlib') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout == "[]\n"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "triptych.cli", "--help"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0, "seconds of CPU"


@pytest.mark.slow
def test_without_its_packages_the_command_says_what_to_install() -> None:
    script = "import sys; sys.modules['typer'] = None; from triptych.cli.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "triptych: typer is not installed: the command needs Triptych's extra 'cli'\n"


@pytest.mark.slow
def test_a_terminal_without_unicode_works() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "triptych.cli", "status", "--url", "http://127.0.0.1:1/é"],
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("triptych: nothing answers at http://127.0.0.1:1/")
    assert done.stderr.count("\n") == 1


def test_shell_completion_works() -> None:
    environment = {"_TRIPTYCH_COMPLETE": "complete_bash", "COMP_WORDS": "triptych st", "COMP_CWORD": "1"}
    result = invoke([], prog_name="triptych", env=environment)
    assert "status" in result.stdout
