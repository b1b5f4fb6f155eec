"""The instances of one pool, put together: members that registered, and what the scaler says of those that start.

``seen`` is the only mutator. The scaler's names are the instance ids.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from triptych.domain.decision import InstancePhase, PoolInstance
from triptych.domain.scaling import ProcessPhase, ScaledInstance

_REGISTER_S = 30.0
"""A process that runs registers within this time, also after a restart of the manager. After that it counts as lost."""
_REPEAT_S = 10.0
"""An instance that stays failed counts as another failed start after this long."""


@dataclass(slots=True)
class _Known:
    """An instance of the scaler when it was last looked at."""

    instance: ScaledInstance
    member: bool
    since_s: float
    """Start of this attempt to start it."""
    ended_s: float | None
    """Time when its process was last seen to have ended."""
    counted_s: float
    silent_s: float | None
    """Time since which it runs without being a member."""
    registered: bool
    """Whether it was a member once. If so, its name is its instance id."""


@dataclass(frozen=True, slots=True)
class Seen:
    instances: tuple[PoolInstance, ...]
    failures: tuple[str, ...]
    """Why instances ended before they were ready, since the last time."""


class StartingInstances:
    """Remembers what was starting, so that each failed start is noticed once."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def observe(self, members: Sequence[PoolInstance], scaled: Iterable[ScaledInstance], now_s: float) -> Seen:
        """Instances that exist now.

        Starting is what is ordered, starts, or runs and has not registered yet. Later it is lost if it had registered
        before, and does not count otherwise. As many of those as there are members that the scaler does not know do not
        count either: they may be the same ones under other names.

        A member whose process has ended counts as what the scaler says of it, although nobody has missed it yet.
        """
        listed = {member.instance_id: member for member in members}
        known: dict[str, _Known] = {}
        failures: list[str] = []
        for instance in scaled:
            before = self._known.get(instance.name)
            now = known[instance.name] = _looked_at(instance, before, listed.get(instance.name), now_s)
            if now.counted_s == now_s:
                failures.append(f"{instance.name}: {instance.reason or 'it failed'}")
        self._known = known
        present = [
            _as_scaled(member, known.get(member.instance_id))
            for member in members
            if member.instance_id not in known or known[member.instance_id].member
        ]
        strangers = sum(member.instance_id not in known for member in members)
        unnamed = [name for name, entry in known.items() if entry.silent_s is not None and not entry.registered]
        same = set(unnamed[:strangers])
        absent = [_absent(name, entry, now_s) for name, entry in known.items() if not entry.member and name not in same]
        return Seen((*present, *(instance for instance in absent if instance is not None)), tuple(failures))


def _looked_at(instance: ScaledInstance, before: _Known | None, listed: PoolInstance | None, now_s: float) -> _Known:
    down = _is_down(instance)
    since_s = now_s if before is None else before.since_s
    ended_s = None if before is None else before.ended_s
    counted_s = -1.0 if before is None else before.counted_s
    if down and (before is None or not _is_down(before.instance)):
        since_s = ended_s = now_s
    up = not down and instance.phase is not ProcessPhase.STARTING  # one that died and starts again may still be listed
    member = listed is not None and up and (ended_s is None or listed.age_s < now_s - ended_s)
    if down and _is_failed_start(instance, before, now_s):
        since_s = counted_s = now_s
    silent_s = None
    if instance.phase is ProcessPhase.RUNNING and not member:
        silent_s = now_s if before is None or before.silent_s is None else before.silent_s
    registered = listed is not None or (before is not None and before.registered)
    return _Known(instance, member, since_s, ended_s, counted_s, silent_s, registered)


def _absent(name: str, known: _Known, now_s: float) -> PoolInstance | None:
    """An instance that is no member; None if it is none at all."""
    if known.instance.phase not in (ProcessPhase.ORDERED, ProcessPhase.STARTING, ProcessPhase.RUNNING):
        return None
    if known.silent_s is not None and now_s - known.silent_s >= _REGISTER_S:
        lost = PoolInstance(name, InstancePhase.LOST, age_s=now_s - known.silent_s)
        return lost if known.registered else None
    return PoolInstance(name, InstancePhase.STARTING, age_s=now_s - known.since_s)


def _is_failed_start(instance: ScaledInstance, before: _Known | None, now_s: float) -> bool:
    """Whether an instance that is down has failed to start since it was last looked at."""
    if before is None:
        return True
    if not _is_down(before.instance):
        return not before.member  # one that was ready has died: that is no failed start
    if before.instance != instance:
        return True
    return instance.phase is ProcessPhase.FAILED and now_s - max(before.since_s, before.counted_s) >= _REPEAT_S


def _is_down(instance: ScaledInstance) -> bool:
    """Whether its process has ended. It waits for its next attempt, or gets none."""
    return instance.phase is ProcessPhase.FAILED or (instance.phase is ProcessPhase.ORDERED and bool(instance.reason))


def _as_scaled(member: PoolInstance, known: _Known | None) -> PoolInstance:
    """Member with the phase that the scaler says: one that is being stopped drains, whatever it reported last."""
    if known is None or known.instance.phase is not ProcessPhase.STOPPING or member.phase is not InstancePhase.READY:
        return member
    return replace(member, phase=InstancePhase.DRAINING)
