"""The size of a pool: token-aware autoscaling (ModServe section 4.2), with limits against oscillation.

``decide`` is a pure function: the same view and limits give the same decision. Differences from the paper: ADR 22.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from triptych.domain.decision import (
    Bounds,
    Decision,
    InstancePhase,
    PoolInstance,
    PoolLoad,
    PoolView,
    Reason,
    Why,
)
from triptych.domain.durations import in_words
from triptych.domain.limits import Count, Positive, PositiveSeconds, Ratio, Seconds, Share, check_limits
from triptych.domain.windows import ATTAINMENT_WINDOW_S, ClassWindow, Judged
from triptych.policy.attainment import wilson
from triptych.policy.capacity import ItemClass, RequestClass

_SURE = 2.33
"""Quantile of the normal distribution: a breach is stated with 1 % error."""
_BREACH_STEP = 0.25
"""Growth under a breach that the load does not explain, as a share of the pool."""
_SICK_SHARE = 0.5
"""An instance with this share of all misses is sick, if the others meet the objective."""
_LEAST_COVERAGE = 0.5
"""Below this share of reports the load is unknown."""
_SHRINK_COVERAGE = 0.9
_SWITCH_SHOWS_S = 10.0
"""Time in which what instances do that have switched can be seen; pools keep their sizes meanwhile."""
_AHEAD_S = 5.0
"""Work in an earlier stage that takes longer than this here is a sign of pressure."""


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """Speed and caution of autoscaling."""

    period_s: PositiveSeconds = 300.0
    """Time between periodic reconfigurations. Pools shrink then only, instance by instance; they grow at once."""
    attainment_threshold: Share = 0.99
    """Share of requests that must meet their objective; below it the pool grows at once."""
    attainment_window_s: PositiveSeconds = ATTAINMENT_WINDOW_S
    """Attainment is that of so much time, at most 300 s. No pool shrinks while it has misses above the threshold."""
    min_judged: Positive = 20
    """Judged requests below which attainment says nothing."""
    report_stale_s: PositiveSeconds = 15.0
    """Without a report for this long the size is held."""
    growth_cooldown_s: Seconds = 5.0
    """Shortest time between two growths."""
    growth_step: Positive = 4
    """Most instances by which a small pool grows at once; a larger one at most doubles."""
    settle_s: Seconds = 60.0
    """After a growth for attainment alone, time after start-up until the next: attainment is measured over such a window."""
    recover_s: PositiveSeconds = 15.0
    """Time in which a queue that breaks the objective is to be worked off."""
    shrink_margin: Ratio = 1.2
    """A smaller pool must bear this multiple of the load."""
    low_periods: Positive = 2
    """Periods in a row that must permit a smaller pool."""
    max_changes_per_hour: Positive = 30
    """Most changes of a pool's size per hour; at half of it the pool no longer shrinks."""
    max_futile_growths: Count = 2
    """Growths for attainment alone, without improvement, after which the pool is held and the breach is shown."""

    def __post_init__(self) -> None:
        check_limits(self, ("growth_cooldown_s", "period_s"))
        if not 0 < self.attainment_threshold < 1:
            raise ValueError(f"attainment_threshold is {self.attainment_threshold}, must be above 0 and below 1")
        if self.attainment_window_s > 300:
            raise ValueError(f"attainment_window_s is {self.attainment_window_s}, must be at most 300")
        if self.shrink_margin < 1:
            raise ValueError(f"shrink_margin is {self.shrink_margin}, must be at least 1")


def decide(view: PoolView, limits: ScalingLimits) -> Decision:
    """The wanted size of one pool. The first reason is the main one."""
    if view.frozen:
        return _hold(view, Reason(Why.FROZEN, view.frozen))
    if view.override is not None:
        return _overridden(view, view.override.size, view.override.left_s)
    if view.planned is not None:
        planned = view.planned
        return _asked(view, planned.size, Why.PLAN, planned.reason, planned.drain)
    stale = view.report_age_s is None or view.report_age_s > limits.report_stale_s
    if view.load is None or stale or view.load.coverage < _LEAST_COVERAGE:
        return _hold(view, Reason(Why.NO_REPORT, _no_report(view)))
    found = _growth(view, view.load, limits)
    if found.target > view.wanted or found.breach:
        return found
    return _shrinking(view, view.load, limits, found)


def _hold(view: PoolView, *reasons: Reason) -> Decision:
    return Decision(view.wanted, reasons, missing=view.facts.missing)


def _no_report(view: PoolView) -> str:
    if view.report_age_s is None or view.load is None:
        return "no router has reported its load"
    if view.load.coverage < _LEAST_COVERAGE:
        return f"reports cover {view.load.coverage:.0%} of the routers' time"
    return f"the last report is {view.report_age_s:.0f} s old"


def _overridden(view: PoolView, size: int, left_s: float) -> Decision:
    return _asked(view, size, Why.OVERRIDE, f"a size of {size} was asked for, for another {in_words(left_s)}")


def _asked(view: PoolView, size: int, why: Why, text: str, first: str = "") -> Decision:
    """Grow at once; shrink instance by instance. ``first``: the one that ends first, if it is named."""
    target = max(view.bounds.least, min(view.bounds.most, size))
    if target != size:
        text += f"; the bounds are {view.bounds.least} to {view.bounds.most}"
    reason = Reason(why, text)
    if target >= view.wanted:
        return Decision(target, (reason,), missing=view.facts.missing)
    if view.count(InstancePhase.DRAINING):
        return _hold(view, reason)
    spare = view.count(InstancePhase.READY) >= view.wanted  # otherwise the scaler takes back one that starts
    drain = first or instance_to_drain(view.instances) if spare else ""
    return Decision(view.wanted - 1, (reason,), drain=drain, missing=view.facts.missing)


# --- growth -------------------------------------------------------------------------------------------------------------


def _growth(view: PoolView, load: PoolLoad, limits: ScalingLimits) -> Decision:
    """The size that load, queue and attainment ask for, within the limits of growth; never less than the present one."""
    reasons: list[Reason] = []
    breach = in_breach(view.attainment, limits)
    sick = _sick(view, limits) if breach else ""
    wait_s = predicted_wait_s(view, load)
    waits = wait_s is not None and view.facts.wait_objective_s is not None and wait_s > view.facts.wait_objective_s
    needed = _needed(view, load, limits, waits=waits)
    goal = view.wanted
    if needed is not None and needed > goal:
        goal = needed
        if waits:
            reasons.append(
                Reason(Why.WAIT, f"the queue takes {wait_s:.3g} s, its limit is {view.facts.wait_objective_s:.3g} s")
            )
        reasons.append(Reason(Why.LOAD, _load_text(view, load, needed)))
    if breach:
        grown, reason = _breach_goal(view, limits, sick)
        goal = max(goal, grown)
        reasons.append(reason)
    if goal < view.bounds.least:
        goal = view.bounds.least
        reasons.append(Reason(Why.BOUNDS, f"the least size is {view.bounds.least}"))
    if view.tiers.grows_first and goal > max(view.wanted, view.bounds.least):
        reasons.insert(0, Reason(Why.TIER, f"{view.tiers.grows_first} is cheaper, and can grow"))
        goal = max(view.wanted, view.bounds.least)
    most = max(view.wanted, view.bounds.most)
    if saturated := goal > most:
        reasons.append(Reason(Why.SATURATED, f"the upper bound is {view.bounds.most}"))
    goal = max(view.wanted, min(goal, most))
    target, limited = _limited(view, goal, limits)
    if limited is not None:
        reasons.insert(0, limited)
    return Decision(
        target,
        tuple(reasons) or (Reason(Why.STEADY, _steady_text(needed, view)),),
        needed=needed,
        breach=breach,
        saturated=saturated,
        sick=sick,
        missing=view.facts.missing,
    )


def in_breach(judged: Judged, limits: ScalingLimits) -> bool:
    """Whether attainment is certainly below its threshold."""
    if judged.count < limits.min_judged:
        return False
    return wilson(judged.missed, judged.count, _SURE)[0] > 1 - limits.attainment_threshold


def predicted_wait_s(view: PoolView, load: PoolLoad) -> float | None:
    """How long the waiting work takes, with what is starting; None without a known capacity."""
    if view.facts.capacity_per_s is None or view.facts.capacity_per_s <= 0:
        return None
    ready, starting = view.serving, view.count(InstancePhase.STARTING)
    ready_per_s = ready * view.facts.capacity_per_s + view.tiers.ready_per_s
    if not load.waiting:
        return 0.0
    oldest_s = max(
        (instance.age_s for instance in view.instances if instance.phase is InstancePhase.STARTING), default=0.0
    )
    until_started_s = max(0.0, view.start_s - oldest_s) if starting else 0.0
    meanwhile = ready_per_s * until_started_s
    if ready_per_s and load.waiting <= meanwhile:
        return load.waiting / ready_per_s
    later_per_s = ready_per_s + starting * view.facts.capacity_per_s
    if not later_per_s:
        return math.inf
    return until_started_s + (load.waiting - meanwhile) / later_per_s


def _needed(view: PoolView, load: PoolLoad, limits: ScalingLimits, *, waits: bool) -> int | None:
    """As many as bear what arrives within the objectives, and as work off what ``waits`` while they are never idle."""
    capacity_per_s = view.facts.capacity_per_s
    if capacity_per_s is None or capacity_per_s <= 0:
        return None
    per_s = max(load.short_per_s, load.long_per_s)
    if waits or load.announced > _AHEAD_S * (view.serving * capacity_per_s + view.tiers.ready_per_s):
        per_s = max(per_s, load.burst_per_s)
    per_s += load.announced / limits.recover_s  # an earlier stage that has grown passes it on at once
    per_s = max(0.0, per_s - view.tiers.ordered_per_s)
    needed = replicas(per_s, capacity_per_s)
    if waits:
        busy_per_s = max(capacity_per_s, view.facts.busy_per_s or 0.0)
        queued_per_s = load.waiting / limits.recover_s + _queued_meanwhile_per_s(view, per_s, busy_per_s, limits)
        needed = max(needed, replicas(per_s + queued_per_s, busy_per_s))
    return max(0, needed - view.switched)


def _queued_meanwhile_per_s(view: PoolView, per_s: float, busy_per_s: float, limits: ScalingLimits) -> float:
    """To work off what queues up until an instance ordered now is ready, beside what is ready or starting.

    It is to be worked off in the recovery time, or in the start time where that is longer: so this at most doubles what is lacking.
    """
    there = view.serving + view.count(InstancePhase.STARTING)
    lacking_per_s = max(0.0, per_s - there * busy_per_s)
    return lacking_per_s * view.start_s / max(view.start_s, limits.recover_s)


def replicas(load_per_s: float, capacity_per_s: float) -> int:
    """ceil(ML / MC) of ModServe section 4.2."""
    return math.ceil(load_per_s / capacity_per_s - 1e-9)


def _breach_goal(view: PoolView, limits: ScalingLimits, sick: str) -> tuple[int, Reason]:
    """The size by attainment alone, one step above the present one if a step may help."""
    missed, count = view.attainment.missed, view.attainment.count
    text = f"{missed} of {count} requests missed their objective here"
    if sick:
        return view.wanted, Reason(Why.SICK, f"{text}, most of them on {sick}: more instances do not help")
    if view.futile_growths >= limits.max_futile_growths:
        return view.wanted, Reason(Why.NOT_CURED, f"{text}; {view.futile_growths} growths did not improve that")
    settled_s = view.start_s + limits.settle_s
    if view.count(InstancePhase.STARTING) or (view.since_growth_s is not None and view.since_growth_s < settled_s):
        return view.wanted, Reason(Why.SETTLING, f"{text}; instances ordered before have not taken effect yet")
    return view.wanted + max(1, math.ceil(_BREACH_STEP * view.wanted)), Reason(Why.BREACH, text)


def _sick(view: PoolView, limits: ScalingLimits) -> str:
    """An instance that has most of the misses while the others meet the objective."""
    ready = [instance for instance in view.instances if instance.phase is InstancePhase.READY]
    everywhere = sum((instance.judged for instance in ready), Judged())
    if len(ready) < 2 or not everywhere.missed:
        return ""
    worst = max(ready, key=lambda instance: (instance.judged.missed, instance.instance_id))
    rest = Judged(everywhere.met - worst.judged.met, everywhere.missed - worst.judged.missed)
    if worst.judged.missed < _SICK_SHARE * everywhere.missed or rest.count < limits.min_judged:
        return ""
    return "" if in_breach(rest, limits) else worst.instance_id


def _limited(view: PoolView, goal: int, limits: ScalingLimits) -> tuple[int, Reason | None]:
    """The goal within the step, the cooldown and the budget."""
    if goal <= view.wanted:
        return view.wanted, None
    if view.changes_last_hour >= limits.max_changes_per_hour:
        return view.wanted, Reason(
            Why.BUDGET, f"{goal} wanted, but {view.changes_last_hour} changes in an hour are the limit"
        )
    if view.since_growth_s is not None and view.since_growth_s < limits.growth_cooldown_s:
        return view.wanted, Reason(Why.COOLDOWN, f"{goal} wanted, but it grew {view.since_growth_s:.1f} s ago")
    if _switches(view):
        return view.wanted, Reason(Why.SETTLING, f"{goal} wanted, but instances switch, which takes effect sooner")
    return min(goal, max(2 * view.wanted, view.wanted + limits.growth_step)), None


def _switches(view: PoolView) -> bool:
    """Whether a switch to or from the pool's stage is still to show in its load."""
    return view.since_switch_s is not None and view.since_switch_s < _SWITCH_SHOWS_S


def _load_text(view: PoolView, load: PoolLoad, needed: int) -> str:
    rates = f"{load.burst_per_s:.4g}, {load.short_per_s:.4g} and {load.long_per_s:.4g} tokens/s over 5, 30 and 300 s"
    switched = ""
    if view.switched:
        at_work = "of other pools help" if view.switched > 0 else "of this pool serve another stage"
        switched = f", while {abs(view.switched)} {at_work}"
    tiers = f", other tiers bear {view.tiers.ordered_per_s:.4g}" if view.tiers.ordered_per_s else ""
    return f"{rates}, {load.waiting:.4g} waiting here and {load.announced:.4g} before, {view.facts.capacity_per_s:.4g} per replica{tiers}: {needed} replicas{switched}"


def _steady_text(needed: int | None, view: PoolView) -> str:
    if needed is None:
        lacks = ", ".join(view.facts.missing) or "profiles"
        return f"what an instance bears is not known (without {lacks}), and attainment asks for no more"
    return f"{needed} needed for the load"


# --- shrinking ----------------------------------------------------------------------------------------------------------


def _shrinking(view: PoolView, load: PoolLoad, limits: ScalingLimits, found: Decision) -> Decision:
    """One instance less, if the load has permitted it for some periods and nothing else speaks against it."""
    needed = view.wanted
    if view.facts.capacity_per_s is not None and view.facts.capacity_per_s > 0:
        highest = max(load.burst_per_s, load.short_per_s, load.long_per_s, load.peak_per_s)
        highest += load.announced / limits.recover_s
        needed = max(
            view.bounds.least,
            replicas(max(0.0, limits.shrink_margin * highest - view.tiers.ordered_per_s), view.facts.capacity_per_s)
            - view.switched,
        )
    needed = min(needed, view.bounds.most)
    low = needed < view.wanted
    found = replace(found, low=low)
    if not low or not view.period_due:
        return found
    if view.low_periods + 1 < limits.low_periods:
        return found
    text = f"{needed} replicas bear {limits.shrink_margin:g} times the highest load, or are the upper bound"
    reason = Reason(Why.LOW_LOAD, text)
    if (caution := _caution(view, load, limits)) is not None:
        return replace(found, reasons=(Reason(Why.CAUTION, caution), reason))
    return replace(found, target=view.wanted - 1, drain=instance_to_drain(view.instances), reasons=(reason,))


def _caution(view: PoolView, load: PoolLoad, limits: ScalingLimits) -> str | None:
    """Why the pool must not shrink now; None if it may."""
    share = view.attainment.attainment
    wait_s = predicted_wait_s(view, load)
    checks = (
        (bool(view.tiers.shrinks_first), f"{view.tiers.shrinks_first} is dearer, and shrinks first"),
        (share is not None and share < limits.attainment_threshold, "attainment is below its threshold"),
        (view.count(InstancePhase.STARTING) > 0, "an instance is starting"),
        (view.count(InstancePhase.DRAINING) > 0, "an instance is draining"),
        (view.count(InstancePhase.READY) < view.wanted, "an instance is missing"),
        (view.since_growth_s is not None and view.since_growth_s < limits.period_s, "the pool grew in this period"),
        (_switches(view), "instances switch"),
        (load.coverage < _SHRINK_COVERAGE, f"reports cover {load.coverage:.0%} of the routers' time"),
        (
            wait_s is not None and view.facts.wait_objective_s is not None and wait_s > view.facts.wait_objective_s,
            "requests wait",
        ),
        (2 * view.changes_last_hour >= limits.max_changes_per_hour, "half of the hour's changes are used up"),
    )
    return next((text for holds, text in checks if holds), None)


def instance_to_drain(instances: Sequence[PoolInstance]) -> str:
    """The ready instance with the least to finish: running requests, then leased bytes. Empty if there is none."""
    ready = [instance for instance in instances if instance.phase is InstancePhase.READY]
    return (
        min(ready, key=lambda instance: (instance.running, instance.leased_bytes, instance.instance_id)).instance_id
        if ready
        else ""
    )


# --- the first size, load and mix -----------------------------------------------------------------------------------------


def initial_size(history_per_s: Sequence[float], capacity_per_s: float | None, bounds: Bounds) -> int:
    """The size to start with: the median load of the same hour in earlier weeks over the capacity of one replica.

    Without history or capacity it is the upper bound; the pool then shrinks by its load. The paper takes the number of
    text instances from that of image instances, which ignores requests without images and the time that text takes.
    """
    if not history_per_s or not capacity_per_s:
        return bounds.most
    return max(bounds.least, min(bounds.most, replicas(median(history_per_s), capacity_per_s)))


def item_mix(classes: Mapping[str, ClassWindow]) -> tuple[ItemClass, ...]:
    """The items of a window, for ``policy.capacity.encode_capacity``: one kind per class."""
    return tuple(
        ItemClass(
            max(1, round(window.media_tokens / window.items)),
            round(window.media_bytes / window.items),
            round(window.pixels / window.items),
            share=window.items,
        )
        for _, window in sorted(classes.items())
        if window.items
    )


def request_mix(classes: Mapping[str, ClassWindow]) -> tuple[RequestClass, ...]:
    """The requests of a window, for ``policy.capacity.text_capacity``. Classes without a finished request have the mean
    answer of the others; empty if none has finished.
    """
    finished = sum(window.done for window in classes.values())
    if not finished:
        return ()
    mean = sum(window.output_tokens for window in classes.values() if window.done) / finished
    return tuple(
        RequestClass(
            max(1, round(window.prompt_tokens / window.arrivals)),
            max(1, round(window.output_tokens / window.done if window.done else mean)),
            share=window.arrivals,
        )
        for _, window in sorted(classes.items())
        if window.arrivals
    )


def encode_tokens(classes: Mapping[str, ClassWindow]) -> float:
    """Tokens to encode: those of arrivals, less the share that was cached among finished requests."""
    finished = sum(window.finished_media_tokens for window in classes.values())
    cached = sum(window.cached_tokens for window in classes.values())
    arrived = sum(window.media_tokens for window in classes.values())
    return arrived * (1 - cached / finished) if finished else float(arrived)


def prompt_tokens(classes: Mapping[str, ClassWindow]) -> float:
    """Tokens to prefill. They include positions of images for decoder-only families only (ModServe insight 7)."""
    return float(sum(window.prompt_tokens for window in classes.values()))


def answer_tokens(classes: Mapping[str, ClassWindow]) -> float:
    """Tokens of the answers that arrivals will have, by those that have ended; 0 if none has."""
    return sum(request_class.share * request_class.output_tokens for request_class in request_mix(classes))


@dataclass(frozen=True, slots=True)
class Colocation:
    """How many instances of each pool share one host."""

    text: int
    encoders: int


def colocation(*, text_devices: int, encoder_devices: int, host_devices: int) -> Colocation | None:
    """A hint: fill a host with a text instance and encoders on the devices that it leaves (ModServe section 4.3).

    Pulls between them stay within the host. None if a text instance takes the whole host, or more. Raises ValueError for a
    number that is not positive.
    """
    if min(text_devices, encoder_devices, host_devices) < 1:
        raise ValueError("numbers of devices must be at least 1")
    left = host_devices - text_devices
    return Colocation(1, left // encoder_devices) if left >= encoder_devices else None
