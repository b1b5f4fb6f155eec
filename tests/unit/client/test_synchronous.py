"""The synchronous client, over gRPC from threads without an event loop."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.client.scripted import HELLO, MODEL, ScriptedRouter
from triptych import Client
from triptych.client import RawPrompt
from triptych.domain.generation import FinishReason
from triptych.errors import Cancelled, InvalidMedia

ROOT = Path(__file__).parents[3]


def test_answers_streams_and_read_calls(target: str) -> None:
    with Client(target) as client:
        answer = client.chat("What?", images=[b"x"], max_tokens=5)
        assert answer.text == "Hello"
        with client.stream("What?") as stream:
            assert [chunk.text for chunk in stream] == ["Hel", "lo"]
            assert stream.finish_reason is FinishReason.STOP
            assert stream.usage == answer.usage
        with client.stream("What?") as stream:
            assert stream.collect().text == "Hello"
        assert client.chat(RawPrompt("1 2"), priority=3).text == "Hello"
        with client.stream("What?", tools=[{"type": "function"}]) as stream:
            assert stream.collect().text == "Hello"
        with client.resolve([b"x"]) as items:
            assert items == ()
        assert client.tokenize("What?") == (0,)
        assert client.models() == (MODEL,)
        assert client.ready().ready
        assert client.timeline(answer.request_id).text_instance == "text-1"
    client.close()
    with pytest.raises(Cancelled, match="closed"):
        client.chat("What?")


def test_errors_are_of_the_error_tree(target: str, router: ScriptedRouter) -> None:
    router.scripts = ((InvalidMedia("image 1 is none", param="messages[0]"),),)
    with Client(target) as client, pytest.raises(InvalidMedia, match="image 1 is none") as caught:
        client.chat("What?")
    assert caught.value.param == "messages[0]"


def test_threads_share_one_client(target: str) -> None:
    with Client(target) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: client.chat(f"Question {number}").text, range(32)))
    assert answers == ["Hello"] * 32


def test_closing_a_stream_early_cancels_the_request(target: str, router: ScriptedRouter) -> None:
    router.scripts = ((HELLO[0], asyncio.Event()),)
    with Client(target) as client:
        with client.stream("What?") as stream:
            assert next(stream).text == "Hel"
            router.closed.clear()
        for _ in range(100):
            if router.closed.is_set():
                break
            client.models()
    assert router.closed.is_set()


@pytest.mark.slow
def test_clients_share_one_loop_and_need_not_be_closed(target: str) -> None:
    script = (
        "import threading\nfrom triptych import Client\n"
        f"first, second = Client({target!r}), Client({target!r})\n"
        "print(first.models()[0].model_id, second.chat('Hi').text)\n"
        "left = second.stream('Hi').__enter__()\n"
        "print(next(left).text, sum(thread.name == 'triptych-client' for thread in threading.enumerate()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("demo Hello\nHel 1\n", "")


def test_no_thread_outlives_a_client(target: str) -> None:
    before = threading.active_count()
    for _ in range(3):
        with Client(target) as client:
            client.models()
    assert threading.active_count() <= before + 1, "gRPC itself keeps one for all channels"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "child", "parent"),
    [
        ("first client in the child", "Hello", ""),
        ("after the parent's close", "InvalidRequest: this process was forked", "Hello"),
        ("beside the parent's client", "InvalidRequest: this process was forked", "Hello"),
        ("the parent's own client", "InvalidRequest: this process was forked", "Hello"),
    ],
)
def test_a_forked_child_gets_an_error_of_the_tree(target: str, scenario: str, child: str, parent: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.client.forking", scenario, target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *_, said, after = done.stdout.splitlines()
    assert said.startswith(child)
    assert after == parent


@pytest.mark.slow
def test_ctrl_c_ends_a_pending_call(target: str, router: ScriptedRouter) -> None:
    router.scripts = ((asyncio.Event(),),)
    script = (
        "import signal\nfrom triptych import Client\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # it is ignored where tests run in the background
        f"with Client({target!r}) as client:\n"
        "    client.models()\n    print('asking', flush=True)\n"
        "    try:\n        client.chat('Hi')\n"
        "    except KeyboardInterrupt:\n        print('interrupted', client.models()[0].model_id, flush=True)\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asking\n"
        while not router.requests:
            assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "interrupted demo\n"), err
    assert "Traceback" not in err
