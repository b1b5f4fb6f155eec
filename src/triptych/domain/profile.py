"""Profiles: what a part of a model costs on one kind of hardware, as measured tables (ModServe section 4.1).

A profile belongs to a *part* of a model, not to a model: models with the same encoder, or the same language model, share
it. Tables instead of fitted curves: whoever reads them interpolates (``policy.costs``). All times are in seconds.
"""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from hashlib import sha256
from typing import Any, NamedTuple, NoReturn, Self, get_type_hints

from triptych.domain.embedding import DType
from triptych.domain.stage import ModelPart, Stage

PROFILE_FORMAT = "triptych-profile"
PROFILE_VERSION = 1
MAX_PROFILE_BYTES = 4 << 20
MAX_ROWS = 4096
"""Most rows of one table."""

_MAX_TEXT = 512
_MAX_OPTIONS = 64
_MAX_COUNT = 2**53 - 1
"""Largest integer that every JSON reader keeps exact."""
_LEAST, _MOST = 1e-18, 1e18
"""Bounds of times and rates: predictions multiply, square and divide them."""


class BadProfile(ValueError):
    """A profile that cannot be used. The message says what is wrong, without the file's name."""


class Origin(Enum):
    MEASURED = "measured"
    SYNTHETIC = "synthetic"
    """Written by hand or computed: nothing was measured."""


class EncodeRow(NamedTuple):
    """Pass of the encoder over ``items`` equal items."""

    item_tokens: int
    """Embedding tokens of each item."""
    items: int
    seconds: float


class PrepareRow(NamedTuple):
    """Decoding and preprocessing of one item on one core."""

    nbytes: int
    pixels: int
    """Pixels of an image or of a video's sampled frames; samples of a sound."""
    seconds: float


class PrefillRow(NamedTuple):
    """Pass over ``new_tokens`` of a prompt after ``cached_tokens`` that were computed before."""

    new_tokens: int
    cached_tokens: int
    seconds: float


class DecodeRow(NamedTuple):
    """Step that decodes ``batch`` sequences of ``mean_context`` tokens each."""

    batch: int
    mean_context: int
    seconds: float


class TransferRow(NamedTuple):
    """Pull of ``nbytes``."""

    backend: str
    nbytes: int
    seconds: float


class LoadRow(NamedTuple):
    """Latencies under Poisson arrivals: of items for ENCODE, to the first token for PREFILL, between tokens for DECODE."""

    stage: Stage
    max_batch: int
    tokens: int
    """Tokens of each item, or of each prompt."""
    output_tokens: int
    """Tokens of each answer; 0 for ENCODE."""
    tokens_per_s: float
    """Offered load in tokens of items or prompts."""
    p50_s: float
    p90_s: float
    p99_s: float
    mean_s: float
    mean_square_s2: float


class ErrorRow(NamedTuple):
    """Relative errors of interpolation, at rows predicted from the others."""

    table: str
    points: int
    """Number of rows predicted."""
    median: float
    worst: float


@dataclass(frozen=True, slots=True)
class ProfileIdentity:
    """Identity of what was measured, and on what. A profile predicts another identity only with a warning."""

    part: ModelPart
    digest: str
    """Digest of the part's weights and configuration, as hex digits."""
    stages: frozenset[Stage]
    hardware: str
    dtype: DType
    tensor_parallel: int = 1
    software: str = ""
    """The engine's version, with that of every library that matters."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Engine options that change costs, e.g. its threads."""

    @property
    def engine(self) -> str:
        """The engine that runs the part: ``triptych`` or ``vllm``."""
        return "vllm" if "vllm" in self.options else "triptych"

    @property
    def key(self) -> Hashable:
        """The same for equal identities only."""
        what = (self.part, self.digest, self.stages, self.hardware, self.dtype, self.tensor_parallel, self.software)
        return *what, *sorted(self.options.items())


@dataclass(frozen=True, slots=True)
class Measured:
    """Circumstances of a profile's measurement. Sizes and times are 0 where they do not apply or are not known."""

    origin: Origin
    at: str
    """ISO 8601, UTC."""
    took_s: float = 0.0
    method: str = ""
    drift: float = 0.0
    """Relative difference between the same control measurement at the end and at the start."""
    weights_nbytes: int = 0
    kv_token_nbytes: int = 0
    """KV memory per token."""
    output_token_nbytes: int = 0
    """Embedding bytes per token."""
    load_s: float = 0.0
    """Time to load the weights from disk, seconds."""
    start_s: float = 0.0
    """Time from the start of the process until it is ready, with ``load_s``, seconds."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Profile of a part: its tables, each without two rows of the same place. The order of rows has no meaning."""

    identity: ProfileIdentity
    measured: Measured
    encode: tuple[EncodeRow, ...] = ()
    prepare: tuple[PrepareRow, ...] = ()
    prefill: tuple[PrefillRow, ...] = ()
    decode: tuple[DecodeRow, ...] = ()
    transfer: tuple[TransferRow, ...] = ()
    load: tuple[LoadRow, ...] = ()
    errors: tuple[ErrorRow, ...] = ()

    def faster(self, speed: float, *, hardware: str) -> Self:
        """The profile of other hardware, whose passes and steps take 1 / ``speed`` of the time. Preparation and
        transfers are those of the host.
        """
        return replace(
            self,
            identity=replace(self.identity, hardware=hardware),
            encode=tuple(row._replace(seconds=row.seconds / speed) for row in self.encode),
            prefill=tuple(row._replace(seconds=row.seconds / speed) for row in self.prefill),
            decode=tuple(row._replace(seconds=row.seconds / speed) for row in self.decode),
            load=tuple(
                row._replace(
                    tokens_per_s=row.tokens_per_s * speed,
                    p50_s=row.p50_s / speed,
                    p90_s=row.p90_s / speed,
                    p99_s=row.p99_s / speed,
                    mean_s=row.mean_s / speed,
                    mean_square_s2=row.mean_square_s2 / speed**2,
                )
                for row in self.load
            ),
        )

    @property
    def file_name(self) -> str:
        """Name of the file, one for each engine and identity up to software and threads: a newer measurement replaces an
        older one.
        """
        identity = self.identity
        hardware = "".join(letter if letter.isalnum() else "-" for letter in identity.hardware.lower())
        parts = (identity.part.value, identity.digest[:12], hardware[:48].strip("-"), identity.dtype.value.lower())
        engine: tuple[str, ...] = ()
        if identity.engine != "triptych":
            arguments = identity.options.get(identity.engine, "")
            engine = identity.engine, *([sha256(arguments.encode()).hexdigest()[:8]] * bool(arguments))
        return "-".join((*parts, f"tp{identity.tensor_parallel}", *engine)) + ".json"


TABLES: Mapping[str, type[Any]] = {
    "encode": EncodeRow,
    "prepare": PrepareRow,
    "prefill": PrefillRow,
    "decode": DecodeRow,
    "transfer": TransferRow,
    "load": LoadRow,
    "errors": ErrorRow,
}
_PLACES: Mapping[str, int] = {
    "encode": 2,
    "prepare": 2,
    "prefill": 2,
    "decode": 2,
    "transfer": 2,
    "load": 5,
    "errors": 1,
}
"""Number of leading columns of a row that say where it was measured. No two rows of a table agree in all of them."""
_ZERO_ALLOWED = frozenset({"cached_tokens", "output_tokens", "nbytes", "pixels", "points", "median", "worst"})


def dump_profile(profile: Profile) -> str:
    """The profile as JSON text: keys and rows are sorted, one row per line. Raises BadProfile if it could not be read."""
    identity, measured = profile.identity, profile.measured
    document: dict[str, Any] = {
        "format": PROFILE_FORMAT,
        "version": PROFILE_VERSION,
        "identity": {field.name: _plain(getattr(identity, field.name)) for field in fields(identity)},
        "measured": {field.name: _plain(getattr(measured, field.name)) for field in fields(measured)},
    }
    lines = [f'"{name}": {json.dumps(value, sort_keys=True)}' for name, value in document.items()]
    for name in TABLES:
        rows = sorted([_plain(value) for value in row] for row in getattr(profile, name))
        written = ",\n".join("  " + json.dumps(row) for row in rows)
        lines.append(f'"{name}": [\n{written}\n]' if rows else f'"{name}": []')
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    parse_profile(text)
    return text


def parse_profile(text: str | bytes) -> Profile:
    """Read a profile strictly: everything must be there, and nothing else. Raises BadProfile."""
    if len(text) > MAX_PROFILE_BYTES:
        raise BadProfile(f"it has {len(text)} bytes, at most {MAX_PROFILE_BYTES} are read")
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except BadProfile:
        raise
    except (ValueError, RecursionError) as error:
        raise BadProfile(f"it is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != PROFILE_FORMAT:
        raise BadProfile(f'it is not a profile: "format" is not "{PROFILE_FORMAT}"')
    version = document.get("version")
    if isinstance(version, bool) or version != PROFILE_VERSION:
        raise BadProfile(f"it has version {str(version)[:_MAX_TEXT]}, only version {PROFILE_VERSION} is supported")
    _same_keys("a profile", document, {"format", "version", "identity", "measured", *TABLES})
    rows: dict[str, Any] = {name: _rows(name, document[name], row) for name, row in TABLES.items()}
    return Profile(_identity(document["identity"]), _measured(document["measured"]), **rows)


def _identity(value: object) -> ProfileIdentity:
    where = "identity"
    entries = _object(where, value)
    _same_keys(where, entries, {field.name for field in fields(ProfileIdentity)})
    options = _object("identity.options", entries["options"])
    if len(options) > _MAX_OPTIONS:
        raise BadProfile(f"identity.options has {len(options)} entries, at most {_MAX_OPTIONS} are allowed")
    digest = _text("identity.digest", entries["digest"])
    if len(digest) < 16 or set(digest) - set("0123456789abcdef"):
        raise BadProfile("identity.digest is not at least 16 lower-case hex digits")
    stages = entries["stages"]
    if not isinstance(stages, list) or not 1 <= len(stages) <= len(Stage):
        raise BadProfile("identity.stages is not a list of stages")
    named = [_member("identity.stages", Stage, stage) for stage in stages]
    if len(set(named)) != len(named):
        raise BadProfile("identity.stages names a stage twice")
    tensor_parallel = _count("identity.tensor_parallel", entries["tensor_parallel"], least=1)
    hardware = _text("identity.hardware", entries["hardware"])
    if not hardware:
        raise BadProfile("identity.hardware is empty")
    return ProfileIdentity(
        part=_member("identity.part", ModelPart, entries["part"]),
        digest=digest,
        stages=frozenset(named),
        hardware=hardware,
        dtype=_member("identity.dtype", DType, entries["dtype"]),
        tensor_parallel=tensor_parallel,
        software=_text("identity.software", entries["software"]),
        options={
            _text("an option's name", name): _text(f"identity.options.{name}", value) for name, value in options.items()
        },
    )


def _measured(value: object) -> Measured:
    entries = _object("measured", value)
    hints = get_type_hints(Measured)
    _same_keys("measured", entries, hints)
    read: dict[str, Any] = {}
    for name, entry in entries.items():
        where = f"measured.{name}"
        if hints[name] is Origin:
            read[name] = _member(where, Origin, entry)
        elif hints[name] is str:
            read[name] = _text(where, entry)
        elif hints[name] is int:
            read[name] = _count(where, entry)
        else:
            read[name] = _number(where, entry, least=-1.0 if name == "drift" else 0.0)
    return Measured(**read)


def _rows(table: str, value: object, row_type: type[Any]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise BadProfile(f"{table} is not a list of rows")
    if len(value) > MAX_ROWS:
        raise BadProfile(f"{table} has {len(value)} rows, at most {MAX_ROWS} are allowed")
    hints = get_type_hints(row_type)
    rows, places = [], set()
    for number, cells in enumerate(value):
        where = f"row {number} of {table}"
        if not isinstance(cells, list) or len(cells) != len(hints):
            raise BadProfile(f"{where} must have {len(hints)} columns: {', '.join(hints)}")
        row = row_type(
            *(
                _cell(f"{name} in {where}", name, kind, cell)
                for (name, kind), cell in zip(hints.items(), cells, strict=True)
            )
        )
        place = tuple(row)[: _PLACES[table]]
        if place in places:
            raise BadProfile(f"{where} repeats {', '.join(map(str, cells[: _PLACES[table]]))}")
        places.add(place)
        rows.append(row)
    return tuple(rows)


def _cell(where: str, name: str, kind: Any, value: object) -> object:
    if kind is Stage:
        return _member(where, Stage, value)
    if kind is str:
        return _text(where, value)
    if kind is int:
        return _count(where, value, least=0 if name in _ZERO_ALLOWED else 1)
    return _number(where, value, least=0.0 if name in _ZERO_ALLOWED else _LEAST)


def _object(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadProfile(f"{where} is not an object")
    return value


def _same_keys(where: str, entries: Mapping[str, Any], wanted: Any) -> None:
    if unknown := sorted(entries.keys() - set(wanted)):
        raise BadProfile(f"{where} has an unknown key {unknown[0][:_MAX_TEXT]!r}")
    if missing := sorted(set(wanted) - entries.keys()):
        raise BadProfile(f"{where} lacks {missing[0]!r}")


def _text(where: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise BadProfile(f"{where} is not a text of at most {_MAX_TEXT} characters")
    if not value.isprintable():
        raise BadProfile(f"{where} has unprintable characters")
    return value


def _member(where: str, kind: Callable[[Any], Any], value: object) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise BadProfile(f"{where} is {str(value)[:_MAX_TEXT]!r}, which is not known") from None


def _count(where: str, value: object, *, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_COUNT:
        raise BadProfile(f"{where} is not a whole number from {least} to {_MAX_COUNT}")
    return value


def _number(where: str, value: object, *, least: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= _MOST:
        raise BadProfile(f"{where} is not a number from {least:g} to {_MOST:g}")
    return float(value)


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, frozenset):
        return sorted(_plain(value) for value in value)  # type: ignore[type-var]  # stages' names
    return dict(value) if isinstance(value, Mapping) else value


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise BadProfile("a key is there twice")
    return entries


def _no_constant(name: str) -> NoReturn:
    raise BadProfile(f"{name} is not a number")
