"""The command line of ``triptych up`` that runs a plan on this machine."""

from collections.abc import Sequence
from pathlib import Path

from triptych.cli.outcome import CliError
from triptych.cli.plan.cluster import PlannedCluster
from triptych.cli.service_options import service_options
from triptych.planning.record import Options, words
from triptych.runtime.hub import DEMO

_SHARED = ("device", "dtype", "kv_cache_bytes", "kv_arena_bytes", "image_cache_bytes", "prepare_threads", "arena_bytes")
"""Settings of instances that ``triptych up`` has for all of them, of memory the least that a role has."""


_VLLM_ARGS = "--vllm-args="


def has_profiles(cluster: PlannedCluster) -> bool:
    """Whether the options of the plan name measured ones."""
    return any(word.startswith("--profiles=") for word in cluster.own_options)


def up_line(cluster: PlannedCluster, profiles: Path, own: Sequence[str] = ()) -> tuple[str, ...]:
    """The command, word by word. ``profiles``: where those of the plan are, unless its options name some. ``own``: further options of
    ``triptych up`` itself. Raises CliError for a model without weights.
    """
    model = Path(cluster.model)
    if model.is_file():
        raise CliError(f"the plan was made with {model.name} alone: name the model with --model", caller=True)
    threads = [pool.cores for pool in cluster.pools if not pool.on_gpu]
    options = {
        "model": cluster.model if cluster.model == DEMO else f"{cluster.model_id}={cluster.model}",
        "roles": cluster.placement.roles_text,
        "switch-roles": "yes" if cluster.placement.switch_roles else "no",
        **({"autoscale": "yes", "pool-sizes": cluster.pool_sizes} if cluster.autoscale else {}),
        **({"threads": str(max(threads))} if threads else {}),
        **_of_instances(cluster),
        "profiles": str(profiles),
    }
    given = (*_given(cluster), *own)
    names = {word.partition("=")[0] for word in given}
    return ("triptych", "up", *(word for word in words(options) if word.partition("=")[0] not in names), *given)


def notes(cluster: PlannedCluster) -> tuple[str, ...]:
    """What the command cannot do of the plan."""
    devices = sum(pool.count * pool.degree for pool in cluster.pools if pool.on_gpu)
    if devices < 2:
        return ()
    return (
        f"all processes have the same GPUs (CUDA_VISIBLE_DEVICES), the plan has {devices}: compose and kubernetes divide them",
    )


def _of_instances(cluster: PlannedCluster) -> Options:
    """Settings that all instances share, or all of a service, by the names of options."""
    shared: dict[str, str] = {}
    of_pools = [(pool, {**pool.mounted, **pool.settings}) for pool in cluster.pools]
    for name in _SHARED:
        values = [settings[name] for _, settings in of_pools if name in settings]
        if not values:
            continue
        value = str(min(map(int, values))) if name.endswith("_bytes") else values[0]
        having = {pool.service for pool, settings in of_pools if name in settings}
        lacking = {pool.service for pool, settings in of_pools if name not in settings}
        dashed = name.replace("_", "-")
        if lacking & {*service_options()[name].services}:
            shared |= {f"{service}-{dashed}": value for service in having - lacking}
        else:
            shared[dashed] = value
    if any("transfer_kv_on_drain" in pool.settings for pool in cluster.pools):
        shared["transfer-kv-on-drain"] = "yes"
    return shared


def _given(cluster: PlannedCluster) -> Sequence[str]:
    """Options of the plan and of the caller; vLLM divides a model by an argument of its own. Raises CliError."""
    degrees = {pool.degree for pool in cluster.pools if pool.settings.get("engine") == "vllm"}
    if degrees <= {1}:
        return cluster.own_options
    if len(degrees) > 1:
        raise CliError("triptych up gives all text instances the same tensor-parallel degree", caller=True)
    arguments = [word.partition("=")[2] for word in cluster.own_options if word.startswith(_VLLM_ARGS)]
    rest = (word for word in cluster.own_options if not word.startswith(_VLLM_ARGS))
    return (*rest, f"{_VLLM_ARGS}{' '.join((*arguments[-1:], f'--tensor-parallel-size {degrees.pop()}')).strip()}")
