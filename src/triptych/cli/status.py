"""``triptych status``: the state of the cluster behind a gateway."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from rich.console import Console

from triptych.cli import running
from triptych.cli.load import load_figures, load_line
from triptych.cli.managers import Managers
from triptych.cli.metrics import Samples, scrape
from triptych.cli.pools import print_manager
from triptych.cli.rest import RestClient, RestError
from triptych.cli.show import folding_table
from triptych.domain.pool import ManagerStatus
from triptych.wire.documents import manager_document

_WHO = {"encode": "encoder", "prefill": "text instance", "decode": "text instance"}
"""The kind of instance that a stage needs."""


async def status(
    managers: Managers, api_key: str | None, admin: Sequence[str], console: Console, *, as_json: bool
) -> bool:
    """Print the status. Return whether every stage has an instance. Raises RestError when neither the gateway at
    ``managers.url`` nor a pool manager answers.

    The admin ports and the pool manager of this user's local cluster are found automatically; ``admin`` and ``managers``
    name others.
    """
    async with RestClient(managers.url, api_key=api_key, timeout_s=10.0) as client:
        url, failure = client.url, None
        ready: dict[str, Any] = {"ready": False, "missing": (), "instances": ()}
        models: list[str] = []
        try:
            ready, models = await client.readiness(), await _models(client)
        except RestError as error:
            failure = error
    async with httpx.AsyncClient(trust_env=False) as http:
        local = await running.find(url, http)
        admins = {name: process.admin for name, process in local.items()}
        loads = {address: await scrape(http, address) for address in (*admins.values(), *admin)}
    manager = await managers.status(local)
    if failure is not None and (failure.caller or manager is None or manager[1] is None):
        raise failure
    if as_json:
        known = {} if manager is None else _manager(*manager)
        load = {address: load_figures(samples) for address, samples in loads.items() if samples is not None}
        document = {"url": url, **ready, "models": models, "admin": admins, **known, "load": load}
        console.print(json.dumps(document, indent=1), soft_wrap=True)
        return bool(ready["ready"])
    lacks = dict.fromkeys(f"no {_WHO.get(stage, stage)}" for stage in ready["missing"])
    state = "ready" if ready["ready"] else f"not ready: {', '.join(lacks)}"
    console.print(f"{url}  {state}" if failure is None else str(failure), style="bold", soft_wrap=True)
    if failure is None:
        console.print(f"models     {', '.join(models) or 'none'}", soft_wrap=True)
    if manager is not None:
        print_manager(*manager, console)
        console.print()
    for line in ready["instances"]:
        console.print(f"instance   {line}", soft_wrap=True)
    _print_loads(admins, loads, console)
    return bool(ready["ready"])


def _manager(address: str, status: ManagerStatus | None) -> dict[str, Any]:
    document = {"pools": None} if status is None else manager_document(status)
    pools = document.pop("pools")
    return {"manager": {"address": address, **document}, "pools": pools}


async def _models(client: RestClient) -> list[str]:
    """Empty while the router is unreachable."""
    try:
        return await client.models()
    except RestError as error:
        if error.caller:
            raise
        return []


def _print_loads(admins: Mapping[str, str], loads: Mapping[str, Samples | None], console: Console) -> None:
    if not loads:
        return
    names = {address: name for name, address in admins.items()}
    table = folding_table("process", "admin port", "load")
    for address, samples in loads.items():
        line = "does not answer" if samples is None else load_line(samples)
        table.add_row(names.get(address, ""), address, line)
    console.print()
    console.print(table)
