"""``triptych scale``, ``triptych limits``, ``triptych drain`` and ``triptych switch``, and the pools of ``triptych status``."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from triptych.cli.managers import Managers
from triptych.cli.outcome import CliError
from triptych.cli.show import folding_table
from triptych.domain.decision import Acting, DecisionSummary, ScalingStatus, Why
from triptych.domain.durations import in_words
from triptych.domain.instance import InstanceLimits
from triptych.domain.pool import MAX_OVERRIDE_S, ManagerStatus, ManualSize, MemberCondition, MemberStatus, PoolStatus
from triptych.domain.replanning import PlanDecision, PlanStatus, in_letters
from triptych.domain.scaling import PoolName
from triptych.domain.stage import INSTANCE_NAMES, Role, Stage
from triptych.errors import FailedPrecondition, InvalidRequest, NotFound
from triptych.rpc.stubs import PoolManagerStub

_SHOWN_DECISIONS = 3
_POLL_S = 0.5
_REGISTERED_S = 10.0
"""A manager that runs for so long has all members that are there."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,7}(?:\.\d{1,3})?)\s*([smhd])")
_ADVICE = {Acting.NONE: "advice only", Acting.MANUAL: "acts on sizes set by hand only"}
_KINDS = {name: role for role, name in INSTANCE_NAMES.items()}


def duration_s(text: str) -> float:
    """Seconds of ``90s``, ``30m``, ``2h`` or ``1d``. Raises CliError."""
    match = _DURATION.fullmatch(text.strip())
    seconds = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if not 0 < seconds <= MAX_OVERRIDE_S:
        text = f"{text!r} is not a time such as 90s, 30m, 2h or 1d, of at most {in_words(MAX_OVERRIDE_S)}"
        raise CliError(text, caller=True)
    return seconds


# --- orders --------------------------------------------------------------------------------------------------------------


async def drain(
    instance_id: str, managers: Managers, console: Console, *, force: bool = False, wait_s: float = 0.0
) -> None:
    """Order an instance or a router to drain, and say how it is replaced. Without ``force`` one that nothing else of its model
    can stand in for is refused. Wait up to ``wait_s`` for it to finish. Raises CliError.
    """

    async def order(manager: PoolManagerStub) -> bool:
        """Whether the pool manager replaces it."""
        pools = (await manager.status()).pools
        pool_of_instance = next((pool for pool in pools if instance_id in _ids(pool)), None)
        if pool_of_instance is None:
            raise _unknown(instance_id, pools)
        try:
            await manager.drain_instance(instance_id, force=force)
        except FailedPrecondition as refused:
            raise CliError(f"{refused.message}; --force drains it nevertheless", caller=True) from None
        scaling = pool_of_instance.scaling
        by_hand = scaling is not None and scaling.acting is Acting.MANUAL and scaling.override is not None
        return by_hand or (scaling is not None and scaling.acting is Acting.ALL)

    replaced = await managers.call(order)
    console.print(f"{instance_id} gets no new work and finishes what it has; that cannot be taken back", soft_wrap=True)
    local = (await managers.local()).get(instance_id)
    if replaced:
        line = "when it has drained, the pool manager stops it, and starts another if the size of the pool wants it"
    elif local is not None:
        line = f"when it has drained, end its process (kill {local.pid}): triptych up starts another in its place"
    else:
        line = "when it has drained, end its process; one that is started in its place gets work again"
    console.print(line, soft_wrap=True)
    if not wait_s:
        return
    await _until(partial(_is_idle, instance_id), managers, wait_s, f"{instance_id} has not finished")
    console.print(f"{instance_id} has finished", soft_wrap=True)


async def switch(
    instance_id: str, role: Role, managers: Managers, console: Console, *, force: bool = False, wait_s: float = 0.0
) -> None:
    """Order an instance to serve the stages of another role. Without ``force`` one that is the last with a stage of its model is
    refused. Wait up to ``wait_s`` until it does. Raises CliError.
    """

    async def order(manager: PoolManagerStub) -> None:
        try:
            await manager.switch_instance(instance_id, role, force=force)
        except FailedPrecondition as refused:
            raise CliError(f"{refused.message}; --force switches it nevertheless", caller=True) from None
        except NotFound:
            raise _unknown(instance_id, (await manager.status()).pools) from None
        except InvalidRequest as refused:
            raise CliError(refused.message, caller=True) from None

    async def is_done(manager: PoolManagerStub) -> bool:
        members = [member for pool in (await manager.status()).pools for member in pool.members]
        return any(member.registration.instance_id == instance_id and member.open == role.stages for member in members)

    await managers.call(order)
    console.print(f"{instance_id} is to serve role {role.value}, until another order or its end", soft_wrap=True)
    if not wait_s:
        return
    await _until(is_done, managers, wait_s, f"{instance_id} has not switched")
    console.print(f"{instance_id} serves role {role.value}", soft_wrap=True)


async def limit(target: str, wanted: InstanceLimits, managers: Managers, console: Console, *, wait_s: float) -> None:
    """Set limits of batches by hand, of an instance or of all of a pool that run; without any, end that. Wait up to ``wait_s`` until all have
    them. Raises CliError, also when one refuses.
    """

    async def order(manager: PoolManagerStub) -> dict[str, int]:
        """The version of the last order that each instance had."""
        members = _targets(target, (await manager.status()).pools)
        for member in members:
            try:
                await manager.set_limits(member.registration.instance_id, wanted)
            except (InvalidRequest, NotFound) as error:
                raise CliError(error.message, caller=True) from None
        return {member.registration.instance_id: _version(member) for member in members}

    async def is_done(manager: PoolManagerStub) -> bool:
        members = [member for pool in (await manager.status()).pools for member in pool.members]
        asked = [member for member in members if member.registration.instance_id in versions]
        answered = [member for member in asked if _version(member) > versions[member.registration.instance_id]]
        for member in answered:
            limits = member.load.limits
            if limits is not None and limits.fault:
                raise CliError(f"{member.registration.instance_id} refuses: {limits.fault}", caller=True)
        return len(answered) == len(asked) and all(_has(member, wanted) for member in answered)

    versions = await managers.call(order)
    await _until(is_done, managers, wait_s, f"{', '.join(versions)}: the limits are not in use")
    until = "until their end, or --auto" if wanted.given else "and what profiles say from now on"
    console.print(f"{', '.join(sorted(versions))}: {wanted}, {until}", soft_wrap=True)


def _targets(target: str, pools: Iterable[PoolStatus]) -> Sequence[MemberStatus]:
    """The instance with this id, or those of this pool. Raises CliError."""
    of_roles = {pool.name: pool.members for pool in pools if pool.name is not None}
    for members in of_roles.values():
        if found := [member for member in members if member.registration.instance_id == target]:
            return found
    if members := of_roles[named(target, list(of_roles))]:
        return members
    raise CliError(f"pool {target} has no instance", caller=True)


def _version(member: MemberStatus) -> int:
    return 0 if member.load.limits is None else member.load.limits.version


def _has(member: MemberStatus, wanted: InstanceLimits) -> bool:
    limits = member.load.limits
    return limits is not None and wanted.over(limits.limits) == limits.limits


async def _until(
    done: Callable[[PoolManagerStub], Awaitable[bool]], managers: Managers, wait_s: float, unfinished: str
) -> None:
    """Wait until a manager says that it is done. Raises CliError after ``wait_s``, with what is ``unfinished``."""
    fault = ""
    try:
        async with asyncio.timeout(wait_s):
            while True:
                try:
                    if await managers.call(done):
                        return
                    fault = ""
                except CliError as error:  # a manager that is away may come back
                    if error.caller:
                        raise
                    fault = f": {error}"
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise CliError(f"{unfinished} within {in_words(wait_s)}{fault}", caller=False) from None


async def _is_idle(instance_id: str, manager: PoolManagerStub) -> bool:
    """Whether this member has drained. A member that has left has, but not one that may still register."""
    cluster_status = await manager.status()
    members = [member for pool in cluster_status.pools for member in pool.members]
    member_found = next((member for member in members if member.registration.instance_id == instance_id), None)
    return (
        cluster_status.up_s >= _REGISTERED_S
        if member_found is None
        else member_found.condition is MemberCondition.DRAINED
    )


def _ids(pool: PoolStatus) -> set[str]:
    return {member.registration.instance_id for member in pool.members}


def _unknown(instance_id: str, pools: Iterable[PoolStatus]) -> CliError:
    names = ", ".join(sorted(name for pool in pools for name in _ids(pool))) or "none"
    return CliError(f"the pool manager knows no member {instance_id!r}; there are: {names}", caller=True)


async def scale(pool: str, size: int | None, for_s: float, managers: Managers, console: Console) -> None:
    """Set a pool's size by hand for a time; None ends that. Raises CliError."""

    async def order(manager: PoolManagerStub) -> tuple[PoolName, ScalingStatus | None]:
        pools_of_status = {pool.name: pool for pool in (await manager.status()).pools if pool.name is not None}
        name = named(pool, list(pools_of_status))
        try:
            order = ManualSize(name.model, name.role, size, for_s if size is not None else 0.0, name.tier)
            await manager.set_size(order)
        except (InvalidRequest, NotFound) as error:
            raise CliError(f"pool {name}: {error.message}", caller=True) from None
        return name, pools_of_status[name].scaling

    name, scaling = await managers.call(order)
    if size is None:
        follows = scaling is not None and scaling.acting is Acting.ALL
        line = f"the size of pool {name} {'follows its load again' if follows else 'is no longer set by hand'}"
    else:
        line = f"pool {name} is to have {size} {'instance' if size == 1 else 'instances'} for {in_words(for_s)}"
    idle = scaling is not None and scaling.acting is Acting.NONE
    note = "; the pool manager has no scaler: it starts and stops nothing itself" if idle else ""
    console.print(line + note, soft_wrap=True)


async def roll(pool: str, degree: int, managers: Managers, console: Console, *, wait_s: float = 0.0) -> None:
    """Replace the instances of a pool, one by one, by such with another tensor-parallel degree. Wait up to ``wait_s`` for the end. Raises
    CliError, also if it was aborted.
    """

    async def order(manager: PoolManagerStub) -> PoolName:
        known = [pool.name for pool in (await manager.status()).pools if pool.name is not None]
        name = named(pool, known)
        try:
            await manager.roll(name, degree)
        except (InvalidRequest, NotFound, FailedPrecondition) as error:
            raise CliError(error.message, caller=True) from None
        return name

    async def is_over(manager: PoolManagerStub) -> bool:
        found = next(pool for pool in (await manager.status()).pools if pool.name == name)
        if found.scaling is None or found.scaling.rolling:
            return False
        told = [
            reason for decision in found.scaling.decisions for reason in decision.reasons if reason.why is Why.DEGREE
        ]
        if told and told[-1].text.startswith("aborted"):
            raise CliError(f"pool {name}: {told[-1].text}", caller=True)
        return bool(told)

    name = await managers.call(order)
    console.print(
        f"pool {name} rolls to tensor-parallel degree {degree}: one instance more starts, then one after the other is replaced",
        soft_wrap=True,
    )
    if not wait_s:
        return
    await _until(is_over, managers, wait_s, f"pool {name} still rolls")
    console.print(f"all instances of pool {name} have degree {degree}", soft_wrap=True)


def named(text: str, pools: list[PoolName]) -> PoolName:
    """The pool that is meant: ``MODEL/ROLE``, or the role alone if one pool has it, with ``@TIER`` where there are tiers. Raises CliError."""
    model, _, last = text.rpartition("/")
    kind, _, tier = last.partition("@")
    role = _KINDS.get(kind.lower()) or next((role for role in Role if role.value == kind.upper()), None)
    matching = [
        pool for pool in pools if pool.role is role and model in ("", pool.model) and (not tier or tier == pool.tier)
    ]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(sorted(map(str, matching or pools))) or "none"
    if matching:
        raise CliError(f"several pools have the role {last!r}; name one of: {names}", caller=True)
    raise CliError(f"there is no pool {text!r}; there are: {names}", caller=True)


# --- status --------------------------------------------------------------------------------------------------------------


def print_manager(address: str, status: ManagerStatus | None, console: Console) -> None:
    if status is None:
        where = f"the pool manager at {address} does not answer"
        local = "the pool manager does not answer; triptych up starts it again when it has ended"
        console.print(f"pools      {where if address else local}", soft_wrap=True)
        return
    leads = "leads" if status.leads else f"follows {status.leader or 'another, which is not known'}"
    console.print(f"manager    {address}  up {in_words(status.up_s)}, {leads}, {status.watchers} watch", soft_wrap=True)
    if status.store_fault:
        console.print(f"store      {status.store_fault}", style="red", soft_wrap=True)
    if status.plan is not None:
        _print_plan(status.plan, console)
    if not status.pools:
        console.print("pools      none yet: no instance has registered", soft_wrap=True)
    for pool in sorted(status.pools, key=lambda pool: pool.role is None):  # routers last
        _print_pool(pool, console)


def _print_plan(plan: PlanStatus, console: Console) -> None:
    follows = "moves to better ones" if plan.replans else "says what is better"
    console.print(f"plan       {plan.model}: {in_letters(plan.present)}, {plan.state}; {follows}", soft_wrap=True)
    if plan.drifts:
        figures = ", ".join(f"{drift}{' (drifted)' if drift.is_one else ''}" for drift in plan.drifts)
        console.print(f"mix        stability indices: {figures}", soft_wrap=True)
    if plan.decisions:
        console.print(_indented(_plan_decisions(plan.decisions[-_SHOWN_DECISIONS:])))


def _plan_decisions(decisions: tuple[PlanDecision, ...]) -> Table:
    table = folding_table("ago", "placement", "outcome", "why")
    for decision in decisions:
        present, wanted = in_letters(decision.present), in_letters(decision.wanted)
        placement = f"stays {present}" if present == wanted else f"{present} to {wanted}"
        table.add_row(in_words(decision.age_s), placement, decision.outcome, decision.reason)
    return table


def _print_pool(pool: PoolStatus, console: Console) -> None:
    console.print()
    if pool.role is None:
        console.print(f"routers of {pool.model}", style="bold", soft_wrap=True)
        for objectives in sorted({",".join(member.registration.slo) for member in pool.members}):
            console.print(_indented(Text(f"SLO {objectives or 'none'}")))
    else:
        console.print(f"pool {pool.name}{_tier(pool)}", style="bold", soft_wrap=True)
    if pool.scaling is not None:
        for line, style in _lines(pool.scaling, pool.role):
            console.print(_indented(Text(line, style=style)))
    console.print(_indented(_members(pool.members)))
    if pool.scaling is not None and pool.scaling.decisions:
        console.print("  decisions", style="dim")
        console.print(_indented(_decisions(pool.scaling.decisions[-_SHOWN_DECISIONS:])))


def _tier(pool: PoolStatus) -> str:
    """Device, price and speed of a pool's tier, as its first instance says."""
    tier = next((member.registration.tier for member in pool.members), None)
    if tier is None:
        return ""
    said = [tier.device] if tier.device else []
    said += [] if tier.usd_per_hour is None else [f"{tier.usd_per_hour:g} USD per hour each"]
    said += [] if tier.speed == 1.0 else [f"speed {tier.speed:g}"]
    return f"  ({', '.join(said)})" if said else ""


def _judged_by(role: Role | None) -> str:
    """The objectives by which a pool is judged (``machine.pool_manager.demand``)."""
    if role is None or role.serves(Stage.PREFILL) or not role.serves(Stage.DECODE):
        return "TTFT"
    return "TTFT and TBT" if role.serves(Stage.ENCODE) else "TBT"


def _lines(scaling: ScalingStatus, role: Role | None) -> Iterator[tuple[str, str]]:
    """Lines on a pool's size, each with a style."""
    counts = [f"{scaling.wanted} wanted ({scaling.bounds.least} to {scaling.bounds.most})", f"{scaling.ready} ready"]
    counts += [
        f"{number} {change}"
        for number, change in ((scaling.starting, "starting"), (scaling.draining, "draining"))
        if number
    ]
    advice = "" if scaling.acting is Acting.ALL else f", {_ADVICE[scaling.acting]}"
    yield f"{scaling.state}: {', '.join(counts)}{advice}", ""
    share = scaling.attainment.attainment
    judged = "no request was judged" if share is None else f"{share:.1%} of {scaling.attainment.count}"
    yield f"{_judged_by(role)} within SLO, over {in_words(scaling.attainment_window_s)}: {judged}", ""
    if scaling.override is not None:
        yield f"set by hand to {scaling.override.size} for another {in_words(scaling.override.left_s)}", "yellow"
    if scaling.fault:
        yield scaling.fault, "red"
    if scaling.rolling:
        yield scaling.rolling, "yellow"
    for advice in scaling.advice:
        yield advice, "dim"


def _members(members: tuple[MemberStatus, ...]) -> Table:
    table = folding_table("instance", "address", "state", "load")
    for member in members:
        state = f"{member.condition}{', suspected' if member.suspected else ''}, {in_words(member.since_s)}"
        waits = [
            f"{stage.value} {load.pending}" + (f" ({load.pending_tokens:,} tokens)" if load.pending_tokens else "")
            for stage, load in member.load.stages.items()
        ]
        registration = member.registration
        state += _switched(member) + _limited(member)
        table.add_row(registration.instance_id, registration.address, state, ", ".join(waits))
    return table


def _limited(member: MemberStatus) -> str:
    """Limits of batches that were ordered since the start; empty without an order."""
    limits = member.load.limits
    if limits is None or not limits.version:
        return ""
    fault = f", refuses others: {limits.fault}" if limits.fault else ""
    return f", {limits.limits}{' by hand' if limits.by_hand else ''}{fault}"


def _switched(member: MemberStatus) -> str:
    """Line on the stages that a switchable instance serves. Empty if it serves those it registered with, as ordered."""
    registration, fault = member.registration, ""
    if member.open and registration.role is not None and member.open != registration.role.stages:
        fault = f", serves {Role.of(member.open).value} for {in_words(member.open_s)}"
    if member.wanted is not None and not member.is_as_wanted:
        fault += f", ordered to serve {member.wanted.value} {in_words(member.wanted_s)} ago"
    elif member.served_s is not None:
        fault += f", first request {member.served_s:.2g} s after the order"
    for closed in member.load.closed:
        if closed.fault:
            fault += f", cannot {closed.stage.value}: {closed.fault}"
    return fault


def _decisions(decisions: tuple[DecisionSummary, ...]) -> Table:
    table = folding_table("ago", "size", "outcome", "why")
    for decision in decisions:
        changes = decision.target != decision.wanted
        size = f"{decision.wanted} to {decision.target}" if changes else f"stays {decision.wanted}"
        said = changes or decision.reasons[0].why in (Why.LIMITS, Why.DEGREE)
        outcome = f"{decision.outcome}{f': {decision.detail}' if decision.detail else ''}" if said else ""
        why = [f"{reason.why}: {reason.text}" for reason in decision.reasons]
        if unsaid := [fact for fact in decision.missing if not any(fact in reason for reason in why)]:
            why.append(f"not known: {', '.join(unsaid)}")
        table.add_row(in_words(decision.age_s), size, outcome, "; ".join(why))
    return table


def _indented(shown: RenderableType) -> Padding:
    return Padding(shown, (0, 0, 0, 2), expand=False)
