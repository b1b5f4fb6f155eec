"""A file beside ``docker-compose.yml`` with the instances of a plan: it replaces the encoders and text instances of that file.

Instances on CPUs are one service for each role. Each instance on GPUs is a service of its own, with GPUs of its own.
"""

import shlex
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

from triptych.cli.outcome import CliError
from triptych.cli.plan.cluster import PlannedCluster, Pool, variables
from triptych.cli.plan.followed import PLAN, PROFILES, manager_settings
from triptych.cli.plan.manifests import Document, checked_images, is_demo, model_directory, read_documents

_REPLACED = ("encoder", "text")
_MODELS = "${TRIPTYCH_MODELS:-models}:/models:ro"


def compose_override(
    cluster: PlannedCluster, compose_file: Path, profiles: Path, followed: Path | None = None
) -> Document:
    """The file. ``profiles``: a directory of this machine with what pool manager and router need to know. ``followed``: that of a plan
    which the pool manager follows. Raises CliError.
    """
    checked_images(cluster)
    (document,) = read_documents(compose_file)
    known = document.get("services") if isinstance(document, dict) else None
    if (
        not isinstance(known, dict)
        or not {*_REPLACED, *(f"{name}-gpu" for name in _REPLACED), "router"} <= known.keys()
    ):
        raise CliError(f"{compose_file} is not Triptych's docker-compose.yml: it lacks services", caller=True)
    services: dict[str, Any] = {name: {"scale": 0} for name in _REPLACED} | dict(_instances(cluster, known))
    manager = manager_settings(cluster)
    if cluster.placement.switch_roles:
        manager["switch_roles"] = "true"
    read = f"{profiles.absolute()}:{PROFILES}:ro"
    plan = [] if followed is None else [f"{followed.absolute()}:{PLAN}:ro", _MODELS]
    for name, service, settings, volumes in (
        ("router", "router", {**cluster.settings["router"], "profiles": PROFILES}, [read]),
        ("pool-manager", "pool_manager", manager, [read, *plan]),
        ("gateway", "gateway", cluster.settings["gateway"], []),
    ):
        changed = {"environment": _literal(variables(service, settings)), "volumes": volumes}
        services[name] = {key: value for key, value in changed.items() if value}
    return {"services": services}


def notes(cluster: PlannedCluster) -> tuple[str, ...]:
    """What the file cannot do of the plan."""
    said = ["docker compose starts no further instances: the pools keep the plan's sizes"] if cluster.autoscale else []
    kinds = {pool.device.title for pool in cluster.pools if pool.on_gpu}
    if len(kinds) > 1:
        said.append(
            f"GPUs are numbered in the order of the roles, for {' and '.join(sorted(kinds))}: change device_ids to this machine's"
        )
    return tuple(said)


def command(cluster: PlannedCluster, compose_file: Path, override: Path) -> str:
    """What starts the cluster."""
    model = (
        {} if is_demo(cluster) else {"TRIPTYCH_MODEL": model_directory(cluster), "TRIPTYCH_MODEL_ID": cluster.model_id}
    )
    given = "".join(f"{name}={shlex.quote(value)} " for name, value in model.items())
    files = shlex.join(("-f", str(compose_file), "-f", str(override)))
    return f"{given}docker compose {files} up --build --detach --wait"


def _instances(cluster: PlannedCluster, known: Mapping[str, Any]) -> Iterator[tuple[str, Document]]:
    devices = count()
    for pool in cluster.pools:
        name = f"planned-{pool.kind.name}"
        if not pool.on_gpu:
            yield name, {**_instance(pool, known[pool.service]), "scale": pool.count, "cpus": float(pool.cores)}
            continue
        for number in range(1, pool.count + 1):
            definition = _instance(pool, known[f"{pool.service}-gpu"])
            gpus = {"driver": "nvidia", "device_ids": [str(next(devices)) for _ in range(pool.degree)]}
            reserved = {"devices": [{**gpus, "capabilities": ["gpu"]}]}
            yield f"{name}-{number}", {**definition, "deploy": {"resources": {"reservations": reserved}}}


def _instance(pool: Pool, of: Document) -> Document:
    """A service like the one of the file, with the pool's settings."""
    definition = deepcopy(of)
    for name in ("profiles", "scale", "deploy"):
        definition.pop(name, None)
    definition["networks"] = {"cluster": {"aliases": [pool.service]}}  # one name for all of a service
    definition["environment"] = {**definition["environment"], **_literal(pool.environment)}
    return definition


def _literal(environment: Mapping[str, str]) -> dict[str, str]:
    """Values in which compose replaces no variables."""
    return {name: value.replace("$", "$$") for name, value in environment.items()}
