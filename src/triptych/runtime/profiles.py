"""Profiles as files: one JSON file each, in a directory."""

import os
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Self

from triptych.domain.profile import MAX_PROFILE_BYTES, BadProfile, Profile, ProfileIdentity, dump_profile, parse_profile
from triptych.domain.stage import ModelPart
from triptych.files import BadFile, read_bytes
from triptych.policy.costs import Costs, costs_for

MAX_PROFILES = 1024
"""Most files that are read from one directory."""
_MAX_CHOSEN = 256


def read_profile(path: Path) -> Profile:
    """Raises BadProfile, naming the file, if it cannot be read or is not a valid profile."""
    try:
        return parse_profile(read_bytes(path, MAX_PROFILE_BYTES))
    except BadFile as error:
        raise BadProfile(f"{path.name} {error}") from None
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


def the_profile(path: Path, part: ModelPart, degree: int = 1) -> Profile:
    """The only profile of a part in a directory or file; of several, that with this tensor-parallel degree. Raises BadProfile."""
    profiles, faults = read_profiles(path)
    matching = [profile for profile in profiles if profile.identity.part is part]
    if faults:
        raise BadProfile(faults[0])
    if len(matching) > 1 or degree > 1:
        matching = [profile for profile in matching if profile.identity.tensor_parallel == degree] or matching
    if len(matching) != 1 or (degree > 1 and matching[0].identity.tensor_parallel != degree):
        text = f" with tensor-parallel degree {degree}" if degree > 1 else ""
        found = sum(profile.identity.tensor_parallel == degree for profile in matching) if degree > 1 else len(matching)
        raise BadProfile(f"{path.name}: {found} profiles of a model's {part.value}{text}, not one")
    return matching[0]


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


class KnownProfiles:
    """Profiles that were read once, those of others, and which of them fits what runs (``policy.costs.costs_for``)."""

    def __init__(self, profiles: Iterable[Profile] = ()) -> None:
        self.own = tuple(profiles)
        self._others: tuple[Profile, ...] = ()
        self._chosen: dict[Hashable, Costs | None] = {}

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """Read the profiles of a directory or file; none without a path. Raises BadProfile if a file is not a valid
        profile, or there is none.
        """
        profiles, faults = ([], []) if path is None else read_profiles(path)
        if faults:
            raise BadProfile(faults[0])
        if path is not None and not profiles:
            raise BadProfile(f"{path.name}: there is no profile (*.json) in it")
        return cls(profiles)

    def __bool__(self) -> bool:
        return bool(self.own or self._others)

    def learn(self, others: Iterable[Profile]) -> None:
        """Replace the profiles that others have."""
        self._others = tuple(others)
        self._chosen.clear()

    def costs(self, wanted: ProfileIdentity) -> Costs | None:
        """Costs of the profile that fits best. None if there is none of this part, dtype and tensor-parallel degree."""
        key = wanted.key
        if key not in self._chosen:
            if len(self._chosen) >= _MAX_CHOSEN:
                self._chosen.clear()
            self._chosen[key] = costs_for((*self.own, *self._others), wanted)
        return self._chosen[key]
