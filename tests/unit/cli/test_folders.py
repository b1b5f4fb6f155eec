"""Errors that are said to be a folder's."""

import errno
import fcntl
from pathlib import Path

import pytest

from triptych.cli.folders import sole_writer
from triptych.cli.outcome import CliError


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(CliError, match=f"^cannot use {tmp_path}/file/folder: Not a directory$") as caught,
        sole_writer(tmp_path / "file" / "folder"),
    ):
        pass
    assert caught.value.caller


def test_a_file_of_the_folder_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in (Path("folder/missing"), tmp_path / "folder" / "missing"):
        with pytest.raises(CliError, match=f"^cannot use {file}: No such file or directory$"):  # noqa: SIM117
            with sole_writer(Path("folder")):
                file.read_bytes()


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/elsewhere/python"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "folder-2/file"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_other_errors_of_the_body_stay_what_they_are(tmp_path: Path, error: OSError) -> None:
    with pytest.raises(OSError) as caught, sole_writer(tmp_path / "folder"):  # noqa: PT011 - it is compared below
        raise error
    assert caught.value is error


def test_a_folder_that_cannot_be_locked_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(_: int, __: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(CliError, match=f"^cannot lock {tmp_path}: No locks available$"), sole_writer(tmp_path):
        pass
