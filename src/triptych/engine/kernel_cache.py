"""Compiled code of kernels on disk: a file for each kernel, its arguments and the processor, in the directory that
Numba chooses.

Numba's own cache takes a kernel for current while its source file is the same, whatever else is compiled into it. It
writes an index before the code, so after an update that was cut off the index names the code of the version before. A
damaged file makes every start fail. Here the name of a file says what it was compiled from, and a checksum whether it
is whole. Where there is no such file, the kernel is compiled.
"""

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import caching as untyped_caching

caching: Any = untyped_caching
_CHECKSUM_NBYTES = 32


def keep(kernel: Any, function: Callable[..., Any], *others: str) -> None:
    """Keep the code of a kernel for which Numba has a cache in files of this module. ``others``: files whose code is
    compiled into it, besides the function's own.
    """
    of_numba = kernel._cache  # noqa: SLF001 - there is no other way to say where and how its code is kept
    made_from = "".join(map(_digest, (function.__code__.co_filename, *others)))
    versions = f"{numba.__version__} {llvmlite.__version__}"
    name = f"{of_numba._impl.filename_base}-{_short(versions + made_from)}"  # noqa: SLF001
    of_numba._cache_file = _Files(of_numba.cache_path, name, None)  # noqa: SLF001


@cache
def _digest(path: str) -> str:
    return sha256(Path(path).read_bytes()).hexdigest()


def _short(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


class _Files(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Stands in for Numba's files and their index. A key is a signature, the processor, and the function's byte code."""

    def load(self, key: Any) -> Any:
        """Read a file; None where there is no whole one. Raises OSError for one that cannot be read."""
        name = self._name(key)
        try:
            kept = Path(self._data_path(name)).read_bytes()
        except FileNotFoundError:
            return None
        code = kept[:-_CHECKSUM_NBYTES]
        return self._load_data(name) if sha256(code).digest() == kept[len(code) :] else None

    def save(self, key: Any, data: Any) -> None:
        """Write a file at once, so that no reader sees half of it. Raises OSError."""
        self._save_data(self._name(key), data)

    def _dump(self, data: Any) -> bytes:
        """Numba reads no further than its code, so a checksum may follow."""
        code: bytes = super()._dump(data)
        return code + sha256(code).digest()

    def _name(self, key: Any) -> str:
        name: str = self._data_name(int(_short(repr(key)), 16))
        return name
