import asyncio
import json
import logging
import subprocess
import sys
from io import StringIO

import pytest

from triptych.runtime import logs


def logger_into(stream: StringIO, formatter: logging.Formatter) -> logging.Logger:
    logger = logging.Logger("triptych.services.some")  # noqa: LOG001 - one of its own, that no other test sees
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    return logger


def test_text_logs_have_the_request_id_after_the_message() -> None:
    stream = StringIO()
    logger = logger_into(stream, logs.TextFormatter(logs.FORMAT))
    logger.info("before")
    token = logs.request_id.set("r-1")
    try:
        logger.info("during")
    finally:
        logs.request_id.reset(token)
    before, during = stream.getvalue().splitlines()
    assert before.endswith("triptych.services.some: before")
    assert during.endswith("triptych.services.some: during [r-1]")


async def test_tasks_of_a_request_inherit_its_id_and_others_do_not() -> None:
    stream = StringIO()
    logger = logger_into(stream, logs.JsonFormatter())

    async def work(name: str) -> None:
        await asyncio.sleep(0)
        logger.info("work of %s", name)

    async def request(name: str) -> None:
        logs.request_id.set(name)
        async with asyncio.TaskGroup() as group:
            group.create_task(work(name))

    await asyncio.gather(request("a"), request("b"))
    logger.info("nobody's")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert {(line["message"], line.get("request_id")) for line in lines} == {
        ("work of a", "a"),
        ("work of b", "b"),
        ("nobody's", None),
    }


def test_json_logs_are_one_object_per_line_with_fields_and_exception() -> None:
    stream = StringIO()
    logger = logger_into(stream, logs.JsonFormatter())
    logger.info("done %d", 1, extra={logs.FIELDS: {"total_s": 0.5, "outcome": "done"}})
    try:
        int("of\nseveral lines")
    except ValueError:
        logger.exception("failed")
    done, failed = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (done["message"], done["total_s"], done["outcome"], done["level"]) == ("done 1", 0.5, "done", "INFO")
    assert done["time"].endswith("+00:00")
    assert "ValueError: invalid literal" in failed["exception"]
    assert "\n" in failed["exception"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_configure_sets_level_and_format(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        root.handlers.clear()
        logs.configure("WARNING", log_format)
        logging.getLogger("x").info("not this")
        logging.getLogger("x").warning("this")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    assert "this" in line
    assert line.startswith("{") is (log_format == "json")


@pytest.mark.slow
@pytest.mark.parametrize(("level", "said"), [("INFO", {"own"}), ("DEBUG", {"own", "call"})])
def test_calls_of_the_http_client_are_logged_for_debugging_only(level: str, said: set[str]) -> None:
    script = (
        "import logging; from triptych.runtime import logs; "
        f"logs.configure({level!r}); logging.getLogger('httpx').info('call'); logging.getLogger('triptych').info('own')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert {line.rsplit(" ", 1)[1] for line in done.stderr.splitlines()} == said


def test_bounded_warnings_say_how_many_of_their_kind_were_left_out() -> None:
    stream, now_s = StringIO(), [0.0]
    warnings = logs.BoundedWarnings(logger_into(stream, logging.Formatter()), lambda: now_s[0])
    for at_s in (0.0, 5.0, 9.9, 10.1, 30.0):
        now_s[0] = at_s
        warnings.warn("one", kind="a")
    warnings.warn("another", kind="b")
    assert stream.getvalue().splitlines() == ["one", "one (and 2 more before it)", "one", "another"]


FOREIGN = "bye\n2026-01-01 00:00:00 ERROR triptych.services.router: forged\x00\x1b[2J\u202e" + "x" * 10_000


@pytest.mark.parametrize("formatter", [logs.TextFormatter(logs.FORMAT), logs.JsonFormatter()])
def test_a_text_of_another_process_is_one_short_printable_line(formatter: logging.Formatter) -> None:
    stream = StringIO()
    logger_into(stream, formatter).info("member %s left: %s", "e-1", FOREIGN)
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()
    assert len(line) < 5000
    assert "forged" in line
    assert "and 5" in line, "what was left out is counted"


def test_an_exception_of_another_process_is_bounded_in_json() -> None:
    stream = StringIO()
    logger_into(stream, logs.JsonFormatter()).error("failed", exc_info=ValueError(FOREIGN + "\n" * 100_000))
    exception = json.loads(stream.getvalue())["exception"]
    assert all(line.isprintable() for line in exception.split("\n"))
    assert len(exception) < 10_000


def test_an_exception_of_another_process_writes_no_line_of_the_log() -> None:
    stream = StringIO()
    logger = logger_into(stream, logs.TextFormatter(logs.FORMAT))
    logger.error("failed", exc_info=ValueError(FOREIGN))
    first, *traceback = stream.getvalue().splitlines()
    assert first.endswith("failed")
    assert all(line.startswith("  ") and line.isprintable() for line in traceback)
