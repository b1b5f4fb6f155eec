"""Costs of stages: predictions from a profile (ModServe section 4.1).

The one reader of profiles for scaling and scheduling. Predictions are monotone: a larger input never costs less. Outside
the measured range they continue the last slope and say so; no input is an error.
"""

from collections.abc import Iterable, Sequence
from enum import Enum

from triptych.domain.profile import LoadRow, Origin, Profile, ProfileIdentity
from triptych.domain.record import record
from triptych.domain.stage import Stage
from triptych.policy.interpolation import Line, Surface, table_rows

MAX_ERROR = 0.15
"""Median error on held-out rows above which a table's estimates have a warning."""
MAX_DRIFT = 0.1
"""Change of the machine's speed during the measurement above which all estimates have a warning."""
_INCONSISTENT = 0.5
"""Median error on held-out rows that no coarse grid of sizes explains."""


class CostWarning(Enum):
    """Why an estimate may be wrong."""

    OUTSIDE_RANGE = "outside the measured range"
    NOT_MEASURED = "not measured"
    """The profile has no rows for it; the value is 0."""
    INACCURATE = "interpolation errs by more than 15 % on held-out rows"
    DRIFTED = "the machine's speed changed by more than 10 % while it was measured"
    OTHER_SOFTWARE = "measured with other software"
    OTHER_OPTIONS = "of an engine with other options"
    OTHER_HARDWARE = "measured on other hardware"
    SYNTHETIC = "from a synthetic profile, which was not measured"


@record
class Estimate:
    """A predicted value. Without warnings it is within the measured range of a matching profile."""

    value: float
    warnings: frozenset[CostWarning] = frozenset()


class Costs:
    """Predictions from one profile. Its own faults (drift, errors, synthetic) are warnings of every estimate."""

    def __init__(self, profile: Profile, warnings: Iterable[CostWarning] = ()) -> None:
        """``warnings`` are added to every estimate."""
        self.profile = profile
        self.warnings = frozenset(warnings) | _faults(profile)
        self._surfaces = {name: Surface(rows) for name, rows in table_rows(profile).items()}
        self._inaccurate = {row.table for row in profile.errors if row.median > MAX_ERROR}
        self._transfers = {
            backend: Line((row.nbytes, row.seconds) for row in profile.transfer if row.backend == backend)
            for backend in {row.backend for row in profile.transfer}
        }

    def encode_s(self, item_tokens: float, items: float = 1) -> Estimate:
        """One pass of the encoder over ``items`` items of ``item_tokens`` embedding tokens each."""
        return self._at("encode", item_tokens, items)

    def prepare_s(self, nbytes: float, pixels: float) -> Estimate:
        """Decoding and preprocessing of one item on one core. ``pixels``: samples of a sound."""
        return self._at("prepare", nbytes / max(1, pixels), pixels)

    def prefill_s(self, new_tokens: float, cached_tokens: float = 0) -> Estimate:
        """One pass over ``new_tokens`` of a prompt after ``cached_tokens`` that were computed before."""
        return self._at("prefill", new_tokens, cached_tokens)

    def decode_s(self, batch: float, mean_context: float) -> Estimate:
        """One decode step of ``batch`` sequences: the time between two tokens (TBT) when nothing else runs."""
        return self._at("decode", mean_context, batch)

    def decode_steps_s(self, batch: float, mean_context: float, steps: int) -> list[float]:
        """The seconds of so many ``decode_s`` in turn, each with one token more of context. 0 each if decoding was not measured."""
        surface = self._surfaces.get("decode")
        return [0.0] * steps if surface is None else surface.run(mean_context, batch, steps)

    def step_s(self, decodes: float, mean_context: float, prompts: Sequence[tuple[float, float]] = ()) -> Estimate:
        """One step that decodes ``decodes`` sequences and computes prompts beside them, each new and cached tokens.

        An engine makes one pass for all, which reads the weights once. So it takes as long as one prompt with as many rows
        as all have together, and what is beyond products: attention to cached tokens, and what decode steps take more than
        a prompt of as many rows, or than with the least context. It is never longer than the parts one after the other.
        One new token after cached ones is a decode: an answer that goes on after another instance.
        """
        if prompts and "decode" in self._surfaces:
            decodes, mean_context, prompts = _with_lone_tokens(decodes, mean_context, prompts)
        parts = [self.prefill_s(new_tokens, cached_tokens) for new_tokens, cached_tokens in prompts]
        if prompts:
            parts.append(self.prefill_s(decodes + sum(new_tokens for new_tokens, _ in prompts)))
        if decodes:
            parts.append(self.decode_s(decodes, mean_context))
        seconds = self.step_seconds(decodes, mean_context, prompts)
        return Estimate(seconds, self.warnings.union(*(part.warnings for part in parts)))

    def step_seconds(self, decodes: float, mean_context: float, prompts: Sequence[tuple[float, float]] = ()) -> float:
        """The value of ``step_s``, without its warnings."""
        if prompts and "decode" in self._surfaces:
            decodes, mean_context, prompts = _with_lone_tokens(decodes, mean_context, prompts)
        decode_s = self._value("decode", mean_context, decodes) if decodes else 0.0
        if not prompts:
            return decode_s
        rows = decodes
        parts_s = extra_s = 0.0
        for new_tokens, cached_tokens in prompts:
            rows += new_tokens
            prefill_s = self._value("prefill", new_tokens, cached_tokens)
            parts_s += prefill_s
            if cached_tokens:
                extra_s += prefill_s - self._value("prefill", new_tokens, 0)
        together_s = extra_s + self._value("prefill", rows, 0)
        if decodes:
            products_s = min(self._value("decode", 0, decodes), self._value("prefill", decodes, 0))
            together_s += decode_s - products_s
        return min(together_s, parts_s + decode_s)

    def decode_line(self, mean_context: float) -> Line:
        """``decode_s`` over the batch, for searches. Raises KeyError if decoding was not measured."""
        return self._surfaces["decode"].along(mean_context)

    def transfer_s(self, backend: str, nbytes: float) -> Estimate:
        """One pull of ``nbytes`` over a transport backend."""
        line = self._transfers.get(backend)
        if line is None:
            return Estimate(0.0, self.warnings | {CostWarning.NOT_MEASURED})
        return self._marked("transfer", line.at(nbytes), inside=line.holds(nbytes))

    def start_s(self) -> Estimate:
        """From the start of a process until it serves."""
        seconds = self.profile.measured.start_s
        return Estimate(seconds, self.warnings if seconds else self.warnings | {CostWarning.NOT_MEASURED})

    def load_levels(self, stage: Stage, max_batch: int) -> tuple[LoadRow, ...]:
        """The measured load levels of the largest batch limit up to ``max_batch``, by offered load."""
        rows = [row for row in self.profile.load if row.stage is stage and row.max_batch <= max_batch]
        largest = max((row.max_batch for row in rows), default=0)
        return tuple(sorted((row for row in rows if row.max_batch == largest), key=lambda row: row.tokens_per_s))

    def measured_load(self, stage: Stage, slo_s: float, max_batch: int) -> Estimate:
        """The highest load, in tokens/s, at which the measured P99 latency of a stage is within ``slo_s``.

        Interpolated between load levels. If even the lowest level misses the objective, that level, with a warning.
        """
        levels = self.load_levels(stage, max_batch)
        if not levels:
            return Estimate(0.0, self.warnings | {CostWarning.NOT_MEASURED})
        before: LoadRow | None = None
        for level in levels:
            if level.p99_s > slo_s:
                if before is None:
                    return Estimate(level.tokens_per_s, self.warnings | {CostWarning.OUTSIDE_RANGE})
                share = (slo_s - before.p99_s) / (level.p99_s - before.p99_s)
                return Estimate(before.tokens_per_s + share * (level.tokens_per_s - before.tokens_per_s), self.warnings)
            before = level
        return Estimate(levels[-1].tokens_per_s, self.warnings)

    def _value(self, table: str, x: float, y: float) -> float:
        """0 where nothing was measured."""
        surface = self._surfaces.get(table)
        return 0.0 if surface is None else surface.at(x, y)

    def _at(self, table: str, x: float, y: float) -> Estimate:
        surface = self._surfaces.get(table)
        if surface is None:
            return Estimate(0.0, self.warnings | {CostWarning.NOT_MEASURED})
        return self._marked(table, surface.at(x, y), inside=surface.holds(x, y))

    def _marked(self, table: str, value: float, *, inside: bool) -> Estimate:
        warnings = self.warnings
        if not inside:
            warnings |= {CostWarning.OUTSIDE_RANGE}
        if table in self._inaccurate:
            warnings |= {CostWarning.INACCURATE}
        return Estimate(value, warnings)


def costs_for(profiles: Iterable[Profile], wanted: ProfileIdentity) -> Costs | None:
    """Costs by the profile that fits best, among those of the same part, dtype and tensor-parallel degree; or None.

    Measured profiles come before synthetic ones, then those of the same hardware, then of the same engine, then of the same
    options, then of the same software, then the newest. Differences become warnings of every estimate.
    """
    fitting = [profile for profile in profiles if _may_stand_for(profile.identity, wanted)]
    if not fitting:
        return None

    def rank(profile: Profile) -> tuple[bool, bool, bool, bool, bool, str]:
        found = _differences(profile.identity, wanted)
        return (
            profile.measured.origin is Origin.MEASURED,
            CostWarning.OTHER_HARDWARE not in found,
            profile.identity.engine == wanted.engine,
            CostWarning.OTHER_OPTIONS not in found,
            CostWarning.OTHER_SOFTWARE not in found,
            profile.measured.at,
        )

    best = max(fitting, key=rank)
    return Costs(best, _differences(best.identity, wanted))


def _may_stand_for(identity: ProfileIdentity, wanted: ProfileIdentity) -> bool:
    return (
        identity.part is wanted.part
        and identity.digest == wanted.digest
        and identity.dtype is wanted.dtype
        and identity.tensor_parallel == wanted.tensor_parallel
        and identity.stages >= wanted.stages
    )


def _differences(identity: ProfileIdentity, wanted: ProfileIdentity) -> frozenset[CostWarning]:
    found = set()
    if identity.hardware != wanted.hardware:
        found.add(CostWarning.OTHER_HARDWARE)
    if identity.software != wanted.software:
        found.add(CostWarning.OTHER_SOFTWARE)
    if dict(identity.options) != dict(wanted.options):
        found.add(CostWarning.OTHER_OPTIONS)
    return frozenset(found)


def disturbances(profile: Profile) -> tuple[str, ...]:
    """Signs that something else used the machine while it was measured; empty without any."""
    drift = profile.measured.drift
    took = f"the same work took {abs(drift):.0%} {'longer' if drift > 0 else 'less time'} later"
    signs = [took] if abs(drift) > MAX_DRIFT else []
    signs += [
        f"a row of table {row.table} is {row.median:.0%} from what the others say"
        for row in profile.errors
        if row.median > _INCONSISTENT
    ]
    return tuple(signs)


def _with_lone_tokens(
    decodes: float, mean_context: float, prompts: Sequence[tuple[float, float]]
) -> tuple[float, float, Sequence[tuple[float, float]]]:
    """The same step, in which each prompt of one token after cached ones is a decode."""
    contexts = [cached_tokens for new_tokens, cached_tokens in prompts if cached_tokens and new_tokens == 1]
    if not contexts:
        return decodes, mean_context, prompts
    number = decodes + len(contexts)
    others = [
        (new_tokens, cached_tokens) for new_tokens, cached_tokens in prompts if new_tokens != 1 or not cached_tokens
    ]
    return number, (decodes * mean_context + sum(contexts)) / number, others


def _faults(profile: Profile) -> frozenset[CostWarning]:
    found = set()
    if profile.measured.origin is Origin.SYNTHETIC:
        found.add(CostWarning.SYNTHETIC)
    if abs(profile.measured.drift) > MAX_DRIFT:
        found.add(CostWarning.DRIFTED)
    return frozenset(found)
