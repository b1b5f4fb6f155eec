"""Decodes untrusted items in separate processes, which are killed when their result is no longer needed.

A decoder cannot be interrupted, may take more time or memory than the header suggests, and may crash. Here that costs
only the item: the process is killed or found dead, and the next item gets another. Its output is read as exactly the
raw bytes that the header implies, and is not trusted otherwise.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from triptych.domain.media import MediaInfo
from triptych.engine.media.audio import Samples
from triptych.engine.media.decoder_process import (
    DATA,
    END,
    LENGTHS,
    NEXT,
    OUT_OF_MEMORY,
    READY,
    REFUSED,
    TEXT_LENGTH,
    Closed,
    read_into,
    receive,
    request_of,
    write,
)
from triptych.engine.media.images import Pixels
from triptych.engine.media.item import MediaItem
from triptych.engine.media.limits import DecodeLimits
from triptych.engine.media.videos import Frame
from triptych.errors import Cancelled, EngineFailure, InvalidMedia
from triptych.ports import StopSignal
from triptych.runtime.cores import Cores, usable_cores

logger = logging.getLogger(__name__)

_MODULE = "triptych.engine.media.decoder_process"
_KEPT_BYTES = 8 << 20
"""Size kept of a file for passing items; memory beyond it is freed."""
_PIPE_BYTES = 1 << 16
_LOGGED_CHARS = 1000
"""Most of what a decoder wrote to stderr for one item that is logged: the end of it."""


class _Decoder:
    """Process that decodes. Any thread may call ``kill``; the other methods are for one thread at a time."""

    def __init__(self, limits: DecodeLimits, cores: Cores) -> None:
        with ExitStack() as opened:
            try:
                self._link, theirs = socket.socketpair()
                opened.callback(self._link.close)
                with theirs:
                    self._file = os.memfd_create("triptych-decoder")
                    opened.callback(os.close, self._file)
                    # Writing to a full pipe fails instead of blocking the decoder.
                    self._stderr, stderr = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                    opened.callback(os.close, self._stderr)
                    try:
                        self._process = self._started(limits, cores, theirs.fileno(), stderr)
                    finally:
                        os.close(stderr)
            except OSError as error:
                raise EngineFailure(f"a decoder process does not start: {error.strerror}") from None
            opened.pop_all()
        self.cores = cores
        self.started = self.busy = self._read = self._ended = False

    def _started(self, limits: DecodeLimits, cores: Cores, link: int, output: int) -> subprocess.Popen[bytes]:
        descriptors = (link, self._file)
        options = (*descriptors, os.getpid(), limits.max_decode_bytes, limits.max_decode_s, ",".join(map(str, cores)))
        return subprocess.Popen(  # noqa: S603 - this interpreter with numeric arguments
            [sys.executable, "-P", "-m", _MODULE, *map(str, options)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=descriptors,
            process_group=0,  # a terminal's signals go to the parent only
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_started(self) -> None:
        """Raises Closed."""
        if not self.started:
            self.started = receive(self._link, 1) == READY

    def ask(self, request: bytes, media: bytes) -> None:
        """Raises Closed."""
        self.busy, self._read = True, False
        write(self._file, memoryview(media))
        self._send(LENGTHS.pack(len(request), len(media)) + request)

    def read(self, array: npt.NDArray[Any]) -> None:
        """Read the next array, of known size. Raises Closed, InvalidMedia."""
        if self._read:
            self._send(NEXT)
        self._expect(DATA)
        read_into(self._file, array.data.cast("B"))
        self._read = True

    def read_end(self) -> None:
        """Raises Closed, InvalidMedia."""
        self._expect(END)
        self._done()

    def _done(self) -> None:
        self.busy = False
        self._log_output()
        if os.fstat(self._file).st_size > _KEPT_BYTES:
            os.ftruncate(self._file, 0)

    def _send(self, data: bytes) -> None:
        try:
            self._link.sendall(data)
        except ConnectionError as error:
            raise Closed from error

    def _expect(self, wanted: bytes) -> None:
        answer = bytes(receive(self._link, 1))
        if answer == REFUSED:
            (nbytes,) = TEXT_LENGTH.unpack(receive(self._link, TEXT_LENGTH.size))
            text = receive(self._link, nbytes).decode(errors="replace")
            self._done()
            raise InvalidMedia(text)
        if answer != wanted:
            raise Closed

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """End it in any state; returns the exit status, negative for a signal."""
        if not self._ended:
            self._ended = True
            self._process.kill()
            self._process.wait()
            self._log_output()
            self._link.close()
            os.close(self._file)
            os.close(self._stderr)
        return self._process.wait()

    def _log_output(self) -> None:
        """Log what it wrote since the last item, escaped: it may contain parts of the item."""
        try:
            text = os.read(self._stderr, _PIPE_BYTES).decode(errors="replace")
        except BlockingIOError:
            return
        if text:
            logger.warning("a decoder process wrote %d characters: %r", len(text), text[-_LOGGED_CHARS:])


class DecoderProcesses:
    """``Decoding`` with one process per concurrent caller, whose number callers must bound; idle ones are kept."""

    def __init__(self, limits: DecodeLimits | None = None) -> None:
        self.limits = limits or DecodeLimits()
        self._idle: dict[Cores, list[_Decoder]] = {}
        self._busy: set[_Decoder] = set()
        self._lock = Lock()
        self._closed = False
        # Processes end with the thread that started them, so start them from a permanent one.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="decoders")

    def start(self) -> None:
        """Start one in advance, so that the first item does not wait. Raises EngineFailure."""
        with self.lease(None) as decoder:
            try:
                decoder.wait_started()
            except Closed:
                raise EngineFailure(f"a decoder process does not start: status {decoder.end()}") from None

    def close(self) -> None:
        """End all processes; running decodes fail."""
        with self._lock:
            self._closed = True
            for decoder in self._busy:
                decoder.kill()
            idle = [decoder for decoders in self._idle.values() for decoder in decoders]
            self._idle.clear()
        for decoder in idle:
            decoder.end()
        self._starter.shutdown(wait=False)

    def item(self, media: bytes, info: MediaInfo, stop: StopSignal | None = None) -> MediaItem:
        return _Item(self, media, info, stop)

    @contextmanager
    def lease(self, stop: StopSignal | None) -> Iterator[_Decoder]:
        """A process for one item; kept as idle afterwards if the item is done, killed if not."""
        decoder = self._idle_one() or self._starter.submit(_Decoder, self.limits, usable_cores()).result()
        with self._lock:
            self._busy.add(decoder)
        try:
            with nullcontext() if stop is None else stop.on_stop(decoder.kill):
                yield decoder
        finally:
            with self._lock:
                self._busy.discard(decoder)
                stopped = stop is not None and stop.stopped
                keep = decoder.started and not (decoder.busy or stopped or self._closed)
                if keep:
                    self._idle.setdefault(decoder.cores, []).append(decoder)
            if not keep:
                decoder.end()

    def _idle_one(self) -> _Decoder | None:
        """The most recently used idle process with the same cores as the calling thread."""
        with self._lock:
            idle = self._idle.get(usable_cores(), [])
            while idle:
                decoder = idle.pop()
                if decoder.alive:
                    return decoder
                decoder.end()
        return None


@dataclass(frozen=True, slots=True)
class _Item:
    """A blocking ``MediaItem``."""

    processes: DecoderProcesses
    media: bytes
    info: MediaInfo
    stop: StopSignal | None

    @property
    def stopped(self) -> bool:
        return self.stop is not None and self.stop.stopped

    def pixels(self) -> Pixels:
        pixels = np.empty((self.info.height, self.info.width, 3), dtype=np.uint8)
        with self._request() as decoder:
            decoder.read(pixels)
            decoder.read_end()
        return pixels

    def frames(self, indices: Sequence[int]) -> Iterator[Frame]:
        times = Counter(indices)
        with self._request(indices=sorted(times)) as decoder:
            for index in sorted(times):
                frame = np.empty((self.info.height, self.info.width, 3), dtype=np.uint8)
                decoder.read(frame)
                for _ in range(times[index]):
                    yield frame
            decoder.read_end()

    def samples(self, sample_rate_hz: int) -> Samples:
        samples = np.empty(self.info.samples_at(sample_rate_hz), dtype=np.float32)
        with self._request(sample_rate_hz_wanted=sample_rate_hz) as decoder:
            decoder.read(samples)
            decoder.read_end()
        return samples

    @contextmanager
    def _request(self, **what: object) -> Iterator[_Decoder]:
        with self.processes.lease(self.stop) as decoder:
            try:
                decoder.wait_started()
                decoder.ask(request_of(self.info, **what), self.media)
                yield decoder
            except Closed:
                self._blame(decoder)

    def _blame(self, decoder: _Decoder) -> NoReturn:
        """Raise the error for a dead process: the item's fault, unless it was stopped, killed or never started."""
        status = decoder.end()
        if self.stopped:
            raise Cancelled("nobody waits for the item any more") from None
        if not decoder.started:
            raise EngineFailure(f"a decoder process does not start: status {status}") from None
        what = f"the {self.info.format} {self.info.modality.value}"
        if status == -signal.SIGKILL:  # by the system or an operator: its own limits end it otherwise
            logger.warning("a decoder process was killed on %s of %d bytes", what, len(self.media))
            raise EngineFailure("the process that decoded the item was killed") from None
        if status == -signal.SIGPROF:
            limit_s = self.processes.limits.max_decode_s
            raise InvalidMedia(f"{what} takes more than {limit_s:g} s to decode") from None
        if status == OUT_OF_MEMORY:
            raise InvalidMedia(f"{what} takes more memory to decode than one item may") from None
        logger.warning("a decoder process ended with status %d on %s of %d bytes", status, what, len(self.media))
        raise InvalidMedia(f"{what} cannot be decoded") from None
