"""Decoding in separate processes: equal results, and no decode outlives its caller."""

import errno
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from triptych.domain.media import MediaInfo
from triptych.engine.media.audio import decode_audio
from triptych.engine.media.decoders import DecoderProcesses
from triptych.engine.media.images import decode_image
from triptych.engine.media.limits import DecodeLimits
from triptych.engine.media.videos import decode_video
from triptych.errors import Cancelled, EngineFailure, InvalidMedia
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.runtime.offload import Stop
from triptych.testing import clips
from triptych.testing.hostile import jpeg_of_many_scans
from triptych.testing.media import png

pytestmark = pytest.mark.slow

LIMITS = MediaLimits(max_scanned_pixels=10**15)
SLOW = jpeg_of_many_scans(8000, 8000, scans=20_000)
"""Minutes of CPU time."""
SOON_S = 60.0


def looked_at(data: bytes) -> tuple[bytes, MediaInfo]:
    return data, inspect_media(data, LIMITS)


@pytest.fixture
def decoders() -> Iterator[DecoderProcesses]:
    processes = DecoderProcesses()
    yield processes
    processes.close()
    assert not running()


def running() -> list[psutil.Process]:
    """Decoder processes of this process."""
    found = []
    for child in psutil.Process().children():
        try:
            if "decoder_process" in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.Error:
            continue
    return found


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + SOON_S  # noqa: TID251 - of real processes
    while not condition():
        assert time.monotonic() < deadline_s  # noqa: TID251
        time.sleep(0.01)


@pytest.mark.parametrize("width", [1, 8, 300])
def test_images_equal_those_decoded_in_this_process(decoders: DecoderProcesses, width: int) -> None:
    media, info = looked_at(png(width, 20))
    pixels = decoders.item(media, info).pixels()
    assert np.array_equal(pixels, decode_image(media, info))


@pytest.mark.parametrize("indices", [[0, 3, 3, 11], [7], [2, 2]])
def test_frames_equal_those_decoded_in_this_process(decoders: DecoderProcesses, indices: list[int]) -> None:
    media, info = looked_at(clips.video(frames=12))
    frames = list(decoders.item(media, info).frames(indices))
    assert np.array_equal(frames, list(decode_video(media, info, indices)))


def test_audio_equals_that_decoded_in_this_process(decoders: DecoderProcesses) -> None:
    media, info = looked_at(clips.audio(1.0, form="mp3"))
    assert np.array_equal(decoders.item(media, info).samples(16_000), decode_audio(media, info, 16_000))


def test_one_process_serves_item_after_item_despite_errors(decoders: DecoderProcesses) -> None:
    decoders.start()
    (process,) = running()
    media, info = looked_at(png(50, 20))
    for _ in range(3):
        decoders.item(media, info).pixels()
        with pytest.raises(InvalidMedia, match="the image is 50x20, its header says 51x20"):
            decoders.item(media, replace(info, width=51)).pixels()
        with pytest.raises(InvalidMedia, match="the png image is cut off"):
            decoders.item(media[:60], info).pixels()
    assert running() == [process]


def test_a_decoder_is_small(decoders: DecoderProcesses) -> None:
    """A decoder starts without torch."""
    decoders.start()
    (process,) = running()
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    decoders.item(*looked_at(png(50, 20))).pixels()
    used = process.cpu_times()
    time.sleep(0.3)
    assert process.cpu_times() == used  # idle processes remain


def test_there_are_as_many_processes_as_callers(decoders: DecoderProcesses) -> None:
    media, info = looked_at(png(50, 20))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: decoders.item(media, info).pixels(), range(30)))
    assert 1 <= len(running()) <= 3


def stuck(decoders: DecoderProcesses, pool: ThreadPoolExecutor, stop: Stop) -> tuple["Future[object]", psutil.Process]:
    """A decode that takes minutes, once it runs."""
    media, info = looked_at(SLOW)
    decode: Future[object] = pool.submit(lambda: decoders.item(media, info, stop).pixels())
    until(lambda: running() and sum(running()[0].cpu_times()[:2]) > 0.8)
    return decode, running()[0]


def test_an_abandoned_decode_is_killed(decoders: DecoderProcesses) -> None:
    stop = Stop()
    with ThreadPoolExecutor(1) as pool:
        decode, process = stuck(decoders, pool, stop)
        stop.stop()
        with pytest.raises(Cancelled):
            decode.result(SOON_S)
        until(lambda: not process.is_running())
        media, info = looked_at(png(50, 20))
        assert pool.submit(lambda: decoders.item(media, info, Stop()).pixels()).result(SOON_S).shape == (20, 50, 3)


def test_a_decode_cancelled_before_its_start_does_not_run(decoders: DecoderProcesses) -> None:
    stop = Stop()
    stop.stop()
    with pytest.raises(Cancelled):
        decoders.item(*looked_at(png(50, 20)), stop).pixels()
    assert decoders.item(*looked_at(png(50, 20)), Stop()).pixels().shape == (20, 50, 3)


def test_a_late_stop_has_no_effect(decoders: DecoderProcesses) -> None:
    decoders.start()
    (process,) = running()
    stop = Stop()
    media, info = looked_at(png(50, 20))
    decoders.item(media, info, stop).pixels()
    stop.stop()
    assert decoders.item(media, info).pixels().shape == (20, 50, 3)
    assert running() == [process]


def test_a_crash_of_the_decoder_fails_one_item(decoders: DecoderProcesses) -> None:
    with ThreadPoolExecutor(1) as pool:
        decode, process = stuck(decoders, pool, Stop())
        os.kill(process.pid, signal.SIGSEGV)
        with pytest.raises(InvalidMedia, match="the jpeg image cannot be decoded"):
            decode.result(SOON_S)
    assert decoders.item(*looked_at(png(50, 20))).pixels().shape == (20, 50, 3)


def test_a_decoder_killed_externally_is_not_an_error_of_the_item(decoders: DecoderProcesses) -> None:
    with ThreadPoolExecutor(1) as pool:
        decode, process = stuck(decoders, pool, Stop())
        process.kill()
        with pytest.raises(EngineFailure, match="killed"):
            decode.result(SOON_S)
    assert decoders.item(*looked_at(png(50, 20))).pixels().shape == (20, 50, 3)


@pytest.mark.parametrize(
    ("where", "what"), [(subprocess, "Popen"), (os, "pipe2"), (os, "memfd_create"), (socket, "socketpair")]
)
def test_a_process_that_cannot_be_started_leaves_no_descriptor(
    decoders: DecoderProcesses, monkeypatch: pytest.MonkeyPatch, where: object, what: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(where, what, refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        with pytest.raises(EngineFailure, match="does not start"):
            decoders.item(*looked_at(png(50, 20))).pixels()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_idle_process_that_died_is_replaced(decoders: DecoderProcesses) -> None:
    decoders.start()
    (process,) = running()
    process.kill()
    until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert decoders.item(*looked_at(png(50, 20))).pixels().shape == (20, 50, 3)
    assert running() != [process]


def test_time_is_bounded() -> None:
    decoders = DecoderProcesses(DecodeLimits(max_decode_s=0.5))
    try:
        with pytest.raises(InvalidMedia, match=r"the jpeg image takes more than 0\.5 s to decode"):
            decoders.item(*looked_at(SLOW)).pixels()
        for _ in range(3):  # idle time and earlier items do not count
            assert decoders.item(*looked_at(png(50, 20))).pixels().shape == (20, 50, 3)
    finally:
        decoders.close()


def test_memory_is_bounded() -> None:
    decoders = DecoderProcesses(DecodeLimits(max_decode_bytes=100 << 20))
    try:
        plain = BytesIO()
        Image.new("1", (8000, 8000)).save(plain, "png")
        media, info = looked_at(plain.getvalue())
        with pytest.raises(InvalidMedia, match="takes more memory to decode than one item may"):
            decoders.item(media, info).pixels()
        assert decoders.item(*looked_at(png(50, 20))).pixels().shape == (20, 50, 3)
    finally:
        decoders.close()


def test_abandoned_frames_leave_nothing_behind(decoders: DecoderProcesses) -> None:
    media, info = looked_at(clips.video(frames=12))
    frames = decoders.item(media, info).frames(range(12))
    next(frames)
    frames.close()  # type: ignore[attr-defined]  # it is a generator
    assert not running()
    assert len(list(decoders.item(media, info).frames(range(12)))) == 12


def test_closing_ends_running_decodes() -> None:
    decoders = DecoderProcesses()
    with ThreadPoolExecutor(1) as pool:
        decode, process = stuck(decoders, pool, Stop())
        decoders.close()
        with pytest.raises(EngineFailure, match="killed"):
            decode.result(SOON_S)
    until(lambda: not process.is_running())


def test_a_stop_calls_back_once_and_only_within_its_context() -> None:
    stop, calls = Stop(), []
    with stop.on_stop(lambda: calls.append("early")):
        pass
    with stop.on_stop(lambda: calls.append("within")):
        giving = threading.Thread(target=stop.stop)
        giving.start()
        giving.join()
        stop.stop()
    with stop.on_stop(lambda: calls.append("late")):
        assert stop.stopped
    assert calls == ["within", "late"]


def test_modules_in_the_working_directory_are_not_imported(
    decoders: DecoderProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    assert decoders.item(*looked_at(png(50, 20))).pixels().shape == (20, 50, 3)


def test_the_output_of_a_decoder_is_logged_in_bounded_form(
    decoders: DecoderProcesses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines = (
        "import os",
        "for _ in range(1000):",
        "    try:",
        "        os.write(2, b'noise\\n' * 200)",
        "    except BlockingIOError:",
        "        pass",
    )
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert decoders.item(*looked_at(png(50, 20))).pixels().shape == (20, 50, 3)
    (record,) = [record for record in caplog.records if "wrote" in record.message]
    assert r"noise\n" in record.message
    assert len(record.message) < 2500
    assert capfd.readouterr() == ("", "")


def test_a_decoder_that_does_not_start_says_why_in_the_log(
    decoders: DecoderProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('no numpy here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineFailure, match="does not start"):
        decoders.start()
    assert "no numpy here" in caplog.text
