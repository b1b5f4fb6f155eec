"""Profiles as files: one JSON file each, in a directory."""

import os
from pathlib import Path

from triptych.domain.profile import MAX_PROFILE_BYTES, BadProfile, Profile, dump_profile, parse_profile

MAX_PROFILES = 1024
"""Most files that are read from one directory."""


def read_profile(path: Path) -> Profile:
    """Raises BadProfile, naming the file, if it cannot be read or is not a valid profile."""
    try:
        with path.open("rb") as opened:
            text = opened.read(MAX_PROFILE_BYTES + 1)
        return parse_profile(text)
    except OSError as error:
        raise BadProfile(f"{path.name}: {error.strerror}") from None
    except BadProfile as error:
        raise BadProfile(f"{path.name}: {error}") from None


def write_profile(path: Path, profile: Profile) -> None:
    """Replace the file at once, so that no reader sees half of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        whole.write_text(dump_profile(profile))
        whole.replace(path)
    finally:
        whole.unlink(missing_ok=True)


def read_profiles(path: Path) -> tuple[list[Profile], list[str]]:
    """The profiles of a directory, or of a single file, and what is wrong with the files that are left out."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    profiles, faults = [], [f"only {MAX_PROFILES} of {len(files)} files are read"] if len(files) > MAX_PROFILES else []
    for file in files[:MAX_PROFILES]:
        try:
            profiles.append(read_profile(file))
        except BadProfile as error:
            faults.append(str(error))
    return profiles, faults
