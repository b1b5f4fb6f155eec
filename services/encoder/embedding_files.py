"""Embeddings in files, one each, named by its key (docs/data_plane.md, "Embeddings in files").

    magic | length of the header | header (JSON) | tensors | XXH3-64 of all before

The directory belongs to this user alone. Encoders of one host may share it. The file system is the index, and a file
appears whole, by a rename. One file with a lock and the sum of all bytes lets them keep one bound together. Nothing here
is trusted when it is read: what is not a whole file of this user with the right checksum is removed.
"""

import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from weakref import finalize

from xxhash import xxh3_64, xxh3_64_intdigest

from triptych.domain.embedding import DType, Tensor, TensorSpec

_MAGIC = b"triptych embed 1"
_PREFIX = Struct("<16sI")
_CHECKSUM_NBYTES = 8
_MAX_HEADER_NBYTES = 1 << 16
_BLOCK_NBYTES = 4096
"""Least bytes of a file, so that a bound in bytes is one on their number as well."""
_LOW_WATER = 0.9
"""Part of the bound that is left by making room: only then are all files looked at."""
_LOCK = "triptych-embeddings.lock"
_PARTIAL = "triptych-embedding.partial"
"""The file that is being written. Only the holder of the lock writes."""
_NOTE_NBYTES = 20
"""The sum of all bytes in the file with the lock, in decimal digits."""
_SUFFIX = ".embedding"
_NAME = re.compile(rf"[0-9a-f]{{64}}{re.escape(_SUFFIX)}")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_LOCK_TRIES, _LOCK_PAUSE_S = 50, 0.02
"""For at most a second: a process that is stopped while it holds the lock must stop no other."""


@dataclass(frozen=True, slots=True)
class StoredEmbedding:
    """An embedding and what its ticket says of it."""

    key: bytes
    tokens: int
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.spec.nbytes for tensor in self.tensors)


class DamagedFile(Exception):
    """A file was not what was written, and is removed."""


class EmbeddingFiles:
    """Owner of embeddings in files: those of a directory, together at most ``max_nbytes`` large; those used longest ago are removed first.

    All methods block and may be called by several threads at once.
    """

    def __init__(self, directory: Path, max_nbytes: int) -> None:
        """Makes the directory, and removes what exceeds the bound. Raises OSError, but not for a full disk if the directory
        is there, and ValueError for a directory that is not this user's alone.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        finalize(self, os.close, self._directory)  # not before the last thread is done with it
        self._max_nbytes = max_nbytes
        self.nbytes = 0
        """Of all files, when this process looked last."""
        found = os.fstat(self._directory)
        if found.st_uid != os.geteuid():
            raise ValueError("the directory belongs to another user")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ValueError(f"the directory is open to others (mode {stat.S_IMODE(found.st_mode):o}): chmod go= it")
        try:
            with suppress(TimeoutError), self._locked() as lock:
                self._note(lock, self._shrunk(max_nbytes))
        except OSError as error:
            if error.errno not in _FULL:  # others may make room later
                raise

    def read(self, key: bytes, most_nbytes: int) -> StoredEmbedding | None:
        """The embedding, if there is a file of it with at most ``most_nbytes`` bytes of tensors. Raises OSError, and
        DamagedFile once it has removed what cannot be served.
        """
        name = _name(key)
        try:
            self._check(os.stat(name, dir_fd=self._directory, follow_symlinks=False))
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._directory)
            try:
                found = os.fstat(file)
                self._check(found)
                if found.st_size > most_nbytes + _MAX_HEADER_NBYTES:
                    return None
                stored = _parsed(_content(file, found.st_size), key)
                with suppress(OSError):
                    os.utime(file)  # used now
            finally:
                os.close(file)
        except FileNotFoundError:
            return None
        except DamagedFile:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._directory)
            raise
        return stored

    def write(self, stored: StoredEmbedding) -> bool:
        """Whether it is now there; not if there is no room. Raises OSError, with no part of it left."""
        head = _head(stored)
        nbytes = _occupied(len(head) + stored.nbytes + _CHECKSUM_NBYTES)
        if nbytes > self._max_nbytes or len(head) > _MAX_HEADER_NBYTES:
            return False
        name = _name(stored.key)
        with suppress(FileNotFoundError):
            os.utime(name, dir_fd=self._directory, follow_symlinks=False)
            return True
        with self._locked() as lock:
            total = self._total(lock)
            if total is None or total + nbytes > self._max_nbytes:
                total = self._shrunk(min(int(_LOW_WATER * self._max_nbytes), self._max_nbytes - nbytes))
            if total + nbytes > self._max_nbytes:
                return False
            self._note(lock, total + nbytes)  # before: too much only leads to another look at all files
            try:
                self._write(name, [head, *_parts(stored.tensors)])
            except OSError:
                with suppress(FileNotFoundError):
                    os.unlink(_PARTIAL, dir_fd=self._directory)
                self._note(lock, total)
                raise
        return True

    def _write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Not synchronized with the disk: after a loss of power the checksum tells what is whole."""
        with suppress(FileNotFoundError):
            os.unlink(_PARTIAL, dir_fd=self._directory)  # of a writer that was killed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(_PARTIAL, flags, 0o600, dir_fd=self._directory)
        try:
            checksum = xxh3_64()
            for part in parts:
                checksum.update(part)
                _write_all(file, part)
            _write_all(file, checksum.intdigest().to_bytes(_CHECKSUM_NBYTES, "little"))
        finally:
            os.close(file)
        os.rename(_PARTIAL, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def _check(self, found: os.stat_result) -> None:
        """Raises DamagedFile for what this class did not make so."""
        if not stat.S_ISREG(found.st_mode):
            raise DamagedFile("it is no regular file")
        if found.st_uid != os.geteuid():
            raise DamagedFile("it belongs to another user")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise DamagedFile(f"it is open to others (mode {stat.S_IMODE(found.st_mode):o})")

    # --- the bound ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Generator[int]:
        """The descriptor of the lock's file. Raises TimeoutError, which is an OSError, if others hold it for long."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(_LOCK, flags, 0o600, dir_fd=self._directory)
        try:
            for _ in range(_LOCK_TRIES):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_LOCK_PAUSE_S)
            else:
                raise TimeoutError("another process holds the lock of the directory")
            yield lock
        finally:
            os.close(lock)

    def _total(self, lock: int) -> int | None:
        """Bytes of all files, as the last writer noted; at least as many as there are. None if nobody has."""
        noted = os.pread(lock, _NOTE_NBYTES, 0)
        return int(noted) if len(noted) == _NOTE_NBYTES and noted.isdigit() else None

    def _note(self, lock: int, total: int) -> None:
        os.pwrite(lock, b"%0*d" % (_NOTE_NBYTES, total), 0)
        self.nbytes = total

    def _shrunk(self, most_nbytes: int) -> int:
        """Remove files, those used longest ago first, until the others have at most ``most_nbytes``, and return how many
        they have; more if some cannot be removed. What others put into the directory is left alone.
        """
        found: list[tuple[int, str, int]] = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime_ns, entry.name, _occupied(status.st_size)))
        total = sum(nbytes for _, _, nbytes in found)
        for _, name, nbytes in sorted(found):
            if total <= most_nbytes:
                break
            try:
                os.unlink(name, dir_fd=self._directory)
            except FileNotFoundError:
                pass  # others remove what they find damaged
            except OSError:
                continue
            total -= nbytes
        return total


def _name(key: bytes) -> str:
    return key.hex() + _SUFFIX


def _occupied(nbytes: int) -> int:
    return max(1, -(-nbytes // _BLOCK_NBYTES)) * _BLOCK_NBYTES


def _head(stored: StoredEmbedding) -> bytes:
    fields = {
        "key": stored.key.hex(),
        "tokens": stored.tokens,
        "tensors": [(tensor.spec.name, tensor.spec.dtype.value, tensor.spec.shape) for tensor in stored.tensors],
    }
    header = json.dumps(fields).encode()
    return _PREFIX.pack(_MAGIC, len(header)) + header


def _parts(tensors: Sequence[Tensor]) -> list[memoryview]:
    return [tensor.data.cast("B") for tensor in tensors if tensor.spec.nbytes]


def _write_all(file: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _content(file: int, nbytes: int) -> memoryview:
    content = memoryview(bytearray(nbytes))
    at = 0
    while at < nbytes:
        count = os.readv(file, [content[at:]])
        if not count:
            raise DamagedFile("it became shorter while it was read")
        at += count
    return content.toreadonly()


def _parsed(content: memoryview, key: bytes) -> StoredEmbedding:
    """Raises DamagedFile unless it is what ``EmbeddingFiles.write`` makes of this key's embedding."""
    whole, checksum = content[:-_CHECKSUM_NBYTES], content[-_CHECKSUM_NBYTES:]
    if len(whole) < _PREFIX.size or xxh3_64_intdigest(whole) != int.from_bytes(checksum, "little"):
        raise DamagedFile("it does not have the checksum that it names")
    magic, header_nbytes = _PREFIX.unpack_from(whole)
    start = _PREFIX.size + header_nbytes
    try:
        told = json.loads(bytes(whole[_PREFIX.size : start]))
        specs = [TensorSpec(str(name), DType(dtype), _natural(*shape)) for name, dtype, shape in told["tensors"]]
        named, (tokens,) = bytes.fromhex(told["key"]), _natural(told["tokens"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DamagedFile("its header is none") from None
    if magic != _MAGIC or named != key or start + sum(spec.nbytes for spec in specs) != len(whole):
        raise DamagedFile("its header is that of another file")
    tensors: list[Tensor] = []
    for spec in specs:
        tensors.append(Tensor(spec, whole[start : start + spec.nbytes]))
        start += spec.nbytes
    return StoredEmbedding(key, tokens, tuple(tensors))


def _natural(*numbers: object) -> tuple[int, ...]:
    checked = tuple([number for number in numbers if isinstance(number, int) and number >= 0])
    if len(checked) != len(numbers):
        raise ValueError("a number is none, or is negative")
    return checked
