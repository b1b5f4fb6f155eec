"""``triptych drain``, and the pools of ``triptych status``, from a pool manager."""

from typing import Any

import httpx
from rich.console import Console

from triptych.cli import running
from triptych.cli.outcome import CliError
from triptych.cli.plan import MANAGER
from triptych.domain.pool import ManagerStatus, MemberStatus
from triptych.errors import NotFound, TriptychError
from triptych.rpc.stubs import PoolManagerStub


async def drain(instance_id: str, url: str, manager: str | None, console: Console) -> None:
    """Order an instance to drain. Raises CliError."""
    if manager is None:
        async with httpx.AsyncClient(trust_env=False) as http:
            found = await running.find(url, http)
        if MANAGER not in found:
            raise CliError(
                f"no pool manager of a local cluster is known for {url}; name one with --pool-manager HOST:PORT",
                caller=True,
            )
        manager = found[MANAGER].address
    stub = PoolManagerStub(manager)
    try:
        await stub.drain_instance(instance_id)
    except NotFound:
        raise CliError(f"the pool manager at {manager} knows no member {instance_id!r}", caller=True) from None
    except TriptychError as error:
        raise CliError(f"the pool manager at {manager} does not answer: {error.code}", caller=False) from None
    finally:
        await stub.close()
    console.print(f"{instance_id} gets no new work and finishes what it has", soft_wrap=True)


async def pools(manager: str) -> list[dict[str, Any]] | None:
    """The pools for ``status``; None when the pool manager does not answer."""
    stub = PoolManagerStub(manager)
    try:
        return _document(await stub.status())
    except TriptychError:
        return None
    finally:
        await stub.close()


def _document(status: ManagerStatus) -> list[dict[str, Any]]:
    return [
        {
            "model": pool.model,
            "role": None if pool.role is None else pool.role.value,
            "members": [_member(member) for member in pool.members],
        }
        for pool in status.pools
    ]


def _member(member: MemberStatus) -> dict[str, Any]:
    return {
        "instance_id": member.registration.instance_id,
        "address": member.registration.address,
        "state": member.condition.value,
        "suspected": member.suspected,
        "since_s": round(member.since_s, 1),
        "heard_s": round(member.heard_s, 1),
        "pending": {stage.value: load.pending for stage, load in member.load.stages.items()},
        "pending_tokens": {stage.value: load.pending_tokens for stage, load in member.load.stages.items()},
    }


def print_pools(shown: list[dict[str, Any]], console: Console) -> None:
    for pool in shown:
        kind = "routers" if pool["role"] is None else f"pool {pool['role']}"
        console.print(f"{kind:<10} {pool['model']}: {len(pool['members'])}", soft_wrap=True)
        for member in pool["members"]:
            state = member["state"] + (", suspected" if member["suspected"] else "")
            load = ", ".join(f"{stage} {pending}" for stage, pending in member["pending"].items())
            line = f"  {member['instance_id']:<12} {member['address']:<21} {state} for {member['since_s']:.0f} s"
            console.print(line + (f", pending: {load}" if load else ""), soft_wrap=True)
