"""``triptych status``: the state of the cluster behind a gateway."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
from rich.console import Console

from triptych.cli import running
from triptych.cli.load import load_figures, load_line
from triptych.cli.metrics import Samples, scrape
from triptych.cli.plan import MANAGER
from triptych.cli.pools import pools, print_pools
from triptych.cli.rest import RestClient, RestError

_WHO = {"encode": "encoder", "prefill": "text instance", "decode": "text instance"}
"""The kind of instance that a stage needs."""


async def status(
    url: str, api_key: str | None, admin: Sequence[str], manager: str | None, console: Console, *, as_json: bool
) -> bool:
    """Print the status. Return whether every stage has an instance. Raises RestError when no gateway answers.

    The admin ports and the pool manager of this user's local cluster are found automatically; ``admin`` and ``manager``
    name others.
    """
    async with RestClient(url, api_key=api_key, timeout_s=10.0) as client:
        ready = await client.readiness()
        models = await _models(client)
    async with httpx.AsyncClient(trust_env=False) as http:
        found = await running.find(client.url, http)
        own = {name: one.admin for name, one in found.items()}
        loads = {address: await scrape(http, address) for address in (*own.values(), *admin)}
    document = {"url": client.url, **ready, "models": models, "admin": own}
    if manager is None and MANAGER in found:
        manager = found[MANAGER].address
    if manager is not None:
        document["pools"] = await pools(manager)
    if as_json:
        document["load"] = {address: load_figures(samples) for address, samples in loads.items() if samples is not None}
        console.print(json.dumps(document, indent=1), soft_wrap=True)
    else:
        _print(document, loads, console)
    return bool(ready["ready"])


async def _models(client: RestClient) -> list[str]:
    """Empty while the router is unreachable."""
    try:
        return await client.models()
    except RestError as error:
        if error.caller:
            raise
        return []


def _print(document: dict[str, Any], loads: dict[str, Samples | None], console: Console) -> None:
    lacks = dict.fromkeys(f"no {_WHO.get(stage, stage)}" for stage in document["missing"])
    state = "ready" if document["ready"] else f"not ready: {', '.join(lacks)}"
    console.print(f"{document['url']}  {state}", style="bold")
    console.print(f"models     {', '.join(document['models']) or 'none'}", soft_wrap=True)
    if (shown := document.get("pools", [])) is None:
        console.print("pools      the pool manager does not answer")
    else:
        print_pools(shown, console)
    for line in document["instances"]:
        console.print(f"instance   {line}", soft_wrap=True)
    names = {address: name for name, address in document["admin"].items()}
    for address, samples in loads.items():
        line = "does not answer" if samples is None else load_line(samples)
        if address in names:
            console.print(f"metrics    {names[address]:<12} {address}/metrics  {line}", soft_wrap=True)
        else:
            console.print(f"load       {address}  {line}", soft_wrap=True)
