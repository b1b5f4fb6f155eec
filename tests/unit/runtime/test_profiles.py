"""Profiles as files."""

from pathlib import Path

import pytest

from tests.unit.policy.profiles import DECODER, ENCODER
from triptych.domain.profile import BadProfile, dump_profile, parse_profile
from triptych.runtime.profiles import read_profile, read_profiles, write_profile


def test_a_directory_of_profiles_is_read_and_faulty_files_are_named(tmp_path: Path) -> None:
    for profile in (ENCODER, DECODER):
        write_profile(tmp_path / "deeper" / profile.file_name, profile)
    (tmp_path / "deeper" / "x.json").write_text("{}")
    (tmp_path / "deeper" / "half.json.partial").write_text("{")
    profiles, faults = read_profiles(tmp_path / "deeper")
    assert [profile.identity for profile in profiles] == [DECODER.identity, ENCODER.identity]
    assert len(faults) == 1
    assert faults[0].startswith("x.json: it is not a profile")


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, ENCODER)
    write_profile(path, DECODER)
    assert read_profile(path) == parse_profile(dump_profile(DECODER))
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]
    assert read_profiles(path) == ([read_profile(path)], [])


def test_a_missing_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(BadProfile, match=r"none\.json does not exist"):
        read_profile(tmp_path / "none.json")
