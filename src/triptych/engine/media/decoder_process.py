"""Process that decodes untrusted items one by one: ``python -m triptych.engine.media.decoder_process``.

Started by ``decoders.DecoderProcesses``. It can be killed at any time at the cost of its item. Bytes are passed in a
memory file that both processes have open, so that neither waits for the other to be scheduled midway. An item's bytes
come first, then one raw array at a time. A socket carries the control messages.

A request is two lengths and JSON. The answer is ``DATA`` for each array, ``NEXT`` from the parent when the file is free
again, then ``END``; or ``REFUSED``, a length and a text.

The process has no torch: it starts in a few hundred milliseconds and takes some 20 MB of its own.
"""

import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triptych.domain.media import MediaInfo, Modality
from triptych.engine.heap import keep_freed
from triptych.errors import InvalidMedia
from triptych.runtime.parent import end_with_parent

READY, DATA, NEXT, END, REFUSED = b"R", b"D", b"N", b"E", b"X"
LENGTHS = struct.Struct("!II")
"""Lengths of the JSON and of the item."""
TEXT_LENGTH = struct.Struct("!H")
OUT_OF_MEMORY = 3
"""Exit status after exceeding the memory limit of an item, after which the process is not reused."""
_MAX_TEXT_BYTES = 1000
_LARGEST_KEPT_BYTES, _KEPT_BYTES = 32 << 20, 64 << 20
"""Heap kept between items: page faults take longer than decoding."""
_INFO_FIELDS = ("width", "height", "frames", "duration_s", "samples", "sample_rate_hz", "rotation_deg")


class Closed(Exception):
    """The peer has closed the socket."""


def receive_into(link: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer. Raises Closed."""
    while buffer:
        try:
            nbytes = link.recv_into(buffer, 0, socket.MSG_WAITALL)
        except ConnectionError as error:
            raise Closed from error
        if not nbytes:
            raise Closed
        buffer = buffer[nbytes:]


def receive(link: socket.socket, nbytes: int) -> bytearray:
    """Receive ``nbytes`` bytes. Raises Closed."""
    data = bytearray(nbytes)
    receive_into(link, memoryview(data))
    return data


def write(file: int, data: memoryview) -> None:
    """Write at the start of the file."""
    at = 0
    while at < len(data):
        at += os.pwrite(file, data[at:], at)


def read_into(file: int, buffer: memoryview) -> None:
    """Read from the start of the file. Raises Closed when it is too short."""
    at = 0
    while at < len(buffer):
        nbytes = os.preadv(file, [buffer[at:]], at)
        if not nbytes:
            raise Closed
        at += nbytes


def request_of(info: MediaInfo, **asked: object) -> bytes:
    """The request, sent before the item's bytes."""
    fields = {name: getattr(info, name) for name in _INFO_FIELDS}
    return json.dumps({"modality": info.modality.value, "format": info.format, **fields, **asked}).encode()


def main(argv: list[str]) -> None:
    descriptor, file, parent_pid, max_nbytes, max_cpu_s, cores = argv[1:]
    if not end_with_parent(int(parent_pid)):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent decides
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # noqa: TID251 - read by numpy on import, below
    from triptych.engine.media.item import LocalItem

    keep_freed(_LARGEST_KEPT_BYTES, _KEPT_BYTES)
    _bound_memory(int(max_nbytes))
    link = socket.socket(fileno=int(descriptor))  # closes with the process, when its exit status is available
    link.sendall(READY)
    while True:
        json_nbytes, media_nbytes = LENGTHS.unpack(receive(link, LENGTHS.size))
        asked = json.loads(receive(link, json_nbytes))
        item = LocalItem(os.pread(int(file), media_nbytes, 0), _info(asked, media_nbytes))
        signal.setitimer(signal.ITIMER_PROF, float(max_cpu_s))  # kills the process: decoders cannot be interrupted
        _answer(link, int(file), item, asked)
        signal.setitimer(signal.ITIMER_PROF, 0)
        del item


def _bound_memory(max_nbytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + max_nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _info(asked: dict[str, Any], nbytes: int) -> MediaInfo:
    fields = {name: asked[name] for name in _INFO_FIELDS}
    return MediaInfo(modality=Modality(asked["modality"]), format=asked["format"], nbytes=nbytes, digest=b"", **fields)


def _answer(link: socket.socket, file: int, item: Any, asked: dict[str, Any]) -> None:
    what = f"the {item.info.format} {item.info.modality.value}"
    first = True
    try:
        for array in _decoded(item, asked):
            if not first:
                receive(link, len(NEXT))
            first = False
            write(file, array.data.cast("B"))
            link.sendall(DATA)
    except InvalidMedia as error:
        _refuse(link, error.message)
    except (Closed, ConnectionError, MemoryError):
        raise
    except Exception:  # noqa: BLE001 - decoders raise many types
        _refuse(link, f"{what} cannot be decoded")
    else:
        link.sendall(END)


def _decoded(item: Any, asked: dict[str, Any]) -> Iterator[Any]:
    if "indices" in asked:
        for frame in item.frames(asked["indices"]):
            yield frame if frame.flags.c_contiguous else frame.copy()
    elif "sample_rate_hz_wanted" in asked:
        yield item.samples(asked["sample_rate_hz_wanted"])
    else:
        yield item.pixels()


def _refuse(link: socket.socket, text: str) -> None:
    data = text.encode()[:_MAX_TEXT_BYTES]
    link.sendall(REFUSED + TEXT_LENGTH.pack(len(data)) + data)


if __name__ == "__main__":
    try:
        main(sys.argv)
    except (Closed, ConnectionError):
        os._exit(0)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
