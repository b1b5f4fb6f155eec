"""Files of embeddings: what is served, what is removed, and the bound that encoders keep together."""

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triptych.domain.embedding import DType, Tensor, TensorSpec
from triptych.services.encoder import embedding_files
from triptych.services.encoder.embedding_files import DamagedFile, EmbeddingFiles, StoredEmbedding

MIB = 1 << 20
BLOCK = 4096


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(number: int = 1, nbytes: int = 1000) -> StoredEmbedding:
    """Two tensors, one of them without elements."""
    payload = bytes((number + at) % 256 for at in range(nbytes))
    tensors = (
        Tensor(TensorSpec("embeds", DType.U8, (nbytes // 10, 10)), memoryview(payload)),
        Tensor(TensorSpec("layers", DType.F32, (0, 7)), memoryview(b"")),
    )
    return StoredEmbedding(key(number), 3, tensors)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "made" / "kept"


@pytest.fixture
def files(directory: Path) -> EmbeddingFiles:
    return EmbeddingFiles(directory, MIB)


def file_of(directory: Path, number: int = 1) -> Path:
    return directory / f"{key(number).hex()}.embedding"


def occupied(directory: Path) -> int:
    return sum(-(-file.stat().st_size // BLOCK) * BLOCK for file in directory.glob("*.embedding"))


def content(kept: StoredEmbedding | None) -> tuple[object, ...] | None:
    return (
        None
        if kept is None
        else (kept.key, kept.tokens, [(tensor.spec, bytes(tensor.data)) for tensor in kept.tensors])
    )


def test_what_is_written_is_read_by_other_processes_of_this_user_alone(files: EmbeddingFiles, directory: Path) -> None:
    assert files.write(stored())
    assert content(EmbeddingFiles(directory, MIB).read(key(1), MIB)) == content(stored())
    assert files.read(key(2), MIB) is None
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {0o600}
    assert files.nbytes == occupied(directory) == BLOCK


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def of_another_key(file: Path) -> None:
    EmbeddingFiles(file.parent, MIB).write(stored(2))
    file_of(file.parent, 2).rename(file)


def linked(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def open_to_others(file: Path) -> None:
    file.chmod(0o640)


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize("damage", [cut, emptied, flipped, of_another_key, linked, open_to_others, a_pipe])
def test_what_is_not_as_it_was_written_is_removed_and_not_served(
    files: EmbeddingFiles, directory: Path, damage: Callable[[Path], None]
) -> None:
    files.write(stored())
    damage(file_of(directory))
    with pytest.raises(DamagedFile):
        files.read(key(1), MIB)
    assert not os.path.lexists(file_of(directory))
    assert files.read(key(1), MIB) is None
    assert files.write(stored())
    assert content(files.read(key(1), MIB)) == content(stored())


@given(at=st.integers(0, 10**6), value=st.integers(1, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_change_of_any_byte_is_noticed(files: EmbeddingFiles, directory: Path, at: int, value: int) -> None:
    files.write(stored())
    data = bytearray(file_of(directory).read_bytes())
    data[at % len(data)] ^= value
    file_of(directory).write_bytes(data)
    with pytest.raises(DamagedFile):
        files.read(key(1), MIB)


def test_a_file_of_another_user_is_removed(
    files: EmbeddingFiles, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(stored())
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
        with pytest.raises(DamagedFile, match="another user"):
            files.read(key(1), MIB)
    assert not file_of(directory).exists()


def test_a_directory_with_the_name_of_a_file_is_not_served_and_not_removed(
    files: EmbeddingFiles, directory: Path
) -> None:
    file_of(directory).mkdir()
    with pytest.raises(OSError, match="directory"):
        files.read(key(1), MIB)


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777], ids=["group", "others", "all"])
def test_a_directory_that_is_open_to_others_is_refused(directory: Path, mode: int) -> None:
    directory.mkdir(parents=True)
    directory.chmod(mode)
    with pytest.raises(ValueError, match="open to others"):
        EmbeddingFiles(directory, MIB)


def test_a_directory_of_another_user_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(ValueError, match="another user"):
        EmbeddingFiles(directory, MIB)


def test_what_is_no_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="exists"):
        EmbeddingFiles(tmp_path / "file", MIB)


def test_the_bound_holds_and_what_was_used_longest_ago_goes_first(directory: Path) -> None:
    files = EmbeddingFiles(directory, 10 * BLOCK)
    for number in range(10):
        assert files.write(stored(number))
        os.utime(file_of(directory, number), (number, number))
    assert files.read(key(0), MIB) is not None, "which is a use"
    assert files.write(stored(1)), "as is the wish to write it again"
    assert files.write(stored(10))
    assert {number for number in range(11) if file_of(directory, number).exists()} == {0, 1, *range(3, 11)}
    assert files.nbytes == occupied(directory) == 10 * BLOCK
    for number in range(11, 60):
        assert files.write(stored(number, nbytes=1000 + number * 200))
        assert occupied(directory) <= files.nbytes <= 10 * BLOCK


def test_processes_that_share_a_directory_keep_one_bound(directory: Path) -> None:
    several = [EmbeddingFiles(directory, 10 * BLOCK) for _ in range(3)]
    for number in range(60):
        assert several[number % 3].write(stored(number))
        assert occupied(directory) <= 10 * BLOCK
    assert all(several[number % 3].read(key(59), MIB) for number in range(3))


def test_a_smaller_bound_holds_from_the_start(directory: Path) -> None:
    files = EmbeddingFiles(directory, 10 * BLOCK)
    for number in range(10):
        files.write(stored(number))
    assert EmbeddingFiles(directory, 4 * BLOCK).nbytes == occupied(directory) == 4 * BLOCK


def test_what_is_larger_than_the_bound_or_the_reader_wants_is_left_out(directory: Path) -> None:
    files = EmbeddingFiles(directory, 10 * BLOCK)
    files.write(stored(1))
    assert not files.write(stored(2, nbytes=10 * BLOCK))
    assert files.read(key(1), MIB) is not None, "nothing was removed for it"
    large = EmbeddingFiles(directory, MIB)
    assert large.write(stored(3, nbytes=200_000))
    assert large.read(key(3), 100_000) is None
    assert file_of(directory, 3).exists()


def test_files_of_others_are_left_alone(directory: Path) -> None:
    directory.mkdir(parents=True, mode=0o700)
    others = [directory / name for name in ("thesis.txt", "x.embedding", f"{key(1).hex()}.embedding.old")]
    for other in others:
        other.write_bytes(bytes(20 * BLOCK))
    files = EmbeddingFiles(directory, 2 * BLOCK)
    for number in range(10):
        assert files.write(stored(number))
    assert all(other.exists() for other in others)


def test_what_a_killed_writer_left_is_replaced(files: EmbeddingFiles, directory: Path) -> None:
    partial = directory / "triptych-embedding.partial"
    partial.write_bytes(b"half of it")
    assert files.write(stored())
    assert content(files.read(key(1), MIB)) == content(stored())
    assert not partial.exists()


def test_a_damaged_note_of_the_total_is_made_anew(directory: Path) -> None:
    files = EmbeddingFiles(directory, 10 * BLOCK)
    for number in range(10):
        files.write(stored(number))
    for damage in (b"", b"nonsense", b"1" * 64):
        (directory / "triptych-embeddings.lock").write_bytes(damage)
        assert files.write(stored(100 + len(damage)))
        assert files.nbytes == occupied(directory) <= 10 * BLOCK


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_full_disk_leaves_nothing_and_no_wrong_total(
    files: EmbeddingFiles, directory: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    write = os.write
    calls = iter(range(100))

    def full(file: int, data: memoryview) -> int:
        """Has room for so many calls, of which each writes half of what it should."""
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: max(1, len(data) // 2)])

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            files.write(stored())
    assert list(directory.iterdir()) == [directory / "triptych-embeddings.lock"]
    assert files.nbytes == 0
    assert files.write(stored())
    assert content(files.read(key(1), MIB)) == content(stored())


def test_a_disk_that_is_full_at_the_start_is_used_once_there_is_room(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", no_room)
        files = EmbeddingFiles(directory, MIB)
        assert files.read(key(1), MIB) is None
        with pytest.raises(OSError, match="No space left"):
            files.write(stored())
    assert files.write(stored())
    assert content(files.read(key(1), MIB)) == content(stored())


def no_room(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_short_writes_are_continued(files: EmbeddingFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", lambda file, data: write(file, data[:7]))
        assert files.write(stored())
    assert content(files.read(key(1), MIB)) == content(stored())


def test_a_lock_that_another_process_keeps_is_waited_for_a_second_at_most(
    files: EmbeddingFiles, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_files, "_LOCK_TRIES", 2)
    with (directory / "triptych-embeddings.lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError):
            files.write(stored())
        assert EmbeddingFiles(directory, MIB).read(key(1), MIB) is None, "reading needs no lock"
    assert files.write(stored())
