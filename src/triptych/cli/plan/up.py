"""The command line of ``triptych up`` that runs a plan on this machine."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from triptych.cli.outcome import CliError
from triptych.cli.plan.cluster import PlannedCluster, Pool
from triptych.cli.service_options import service_options
from triptych.domain.scaling import Kind
from triptych.domain.tier import Tier
from triptych.runtime.hub import DEMO
from triptych.runtime.plans import Options, words

_SHARED = ("device", "dtype", "kv_cache_bytes", "kv_arena_bytes", "image_cache_bytes", "prepare_threads", "arena_bytes")
"""Settings of instances that ``triptych up`` has for all of them, of memory the least that a role has."""


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
    tiers = _tiers(cluster)
    options = {
        "model": cluster.model if cluster.model == DEMO else f"{cluster.model_id}={cluster.model}",
        "roles": ",".join(f"{_key(pool, tiers)}:{pool.count}" for pool in cluster.pools),
        "switch-roles": "yes" if cluster.placement.switch_roles else "no",
        **({"autoscale": "yes", "pool-sizes": cluster.pool_sizes} if cluster.autoscale else {}),
        **({"threads": str(max(threads))} if threads else {}),
        **_of_instances([pool for pool in cluster.pools if pool.kind not in tiers]),
        "profiles": str(profiles),
    }
    given = (*cluster.own_options, *own)
    names = {word.partition("=")[0] for word in given}
    if "--plan" in names:  # which has the sizes
        names.add("--pool-sizes")
    if "--replan" in names and not any(
        pool.on_gpu for pool in cluster.pools
    ):  # those on GPUs have memory for their role
        names.add("--no-switch-roles")
    return (
        "triptych",
        "up",
        *(word for word in words(options) if word.partition("=")[0] not in names),
        *_tier_words(cluster, tiers),
        *given,
    )


def notes(cluster: PlannedCluster) -> tuple[str, ...]:
    """What the command cannot do of the plan, or takes for granted."""
    on_gpu = [pool for pool in cluster.pools if pool.on_gpu]
    devices = sum(pool.count * pool.degree for pool in on_gpu)
    if devices < 2:
        return ()
    if cluster.placement.switch_roles:
        return (
            f"all processes have the same GPUs (CUDA_VISIBLE_DEVICES), the plan has {devices}: compose and kubernetes divide them",
        )
    kinds = sorted({pool.device.title for pool in on_gpu})
    if len(kinds) < 2:
        return ()
    return (f"GPUs are numbered in the order of the roles, for {' and '.join(kinds)}: change gpus to this machine's",)


def _tiers(cluster: PlannedCluster) -> Mapping[Kind, Tier]:
    """The tier of each pool that has one. Instances that switch roles have none."""
    if cluster.placement.switch_roles:
        return {}
    return {pool.kind: pool.tier for pool in cluster.pools if pool.tier is not None}


def _key(pool: Pool, tiers: Mapping[Kind, Tier]) -> str:
    """The pool in ``--roles``."""
    return str(Kind(pool.role, tiers[pool.kind].name if pool.kind in tiers else ""))


def _tier_words(cluster: PlannedCluster, tiers: Mapping[Kind, Tier]) -> Iterator[str]:
    """Options that describe the tiers, with the GPUs of each instance, and the settings that only their instances have."""
    numbers = count()
    own = {
        pool.kind: [[str(next(numbers)) for _ in range(pool.degree)] for _ in range(pool.count)]
        for pool in cluster.pools
        if pool.on_gpu
    }
    used = next(numbers)
    for pool in cluster.pools:
        if pool.kind not in tiers:
            continue
        tier = str(tiers[pool.kind])
        if pool.on_gpu:
            tier += f"{',' if ':' in tier else ':'}gpus={_gpus(cluster, pool, own[pool.kind], used)}"
        yield f"--tier={pool.role.value}@{tier}"
        if line := shlex.join(words(_of_pool(cluster, pool))):
            yield f"--tier-settings={_key(pool, tiers)}:{line}"


def _gpus(cluster: PlannedCluster, pool: Pool, own: Sequence[Sequence[str]], used: int) -> str:
    """GPUs of each instance that the pool may have. ``used`` are those of all pools as planned."""
    more = pool.bounds.most - pool.count if cluster.autoscale else 0
    spare = [[str(used + pool.degree * at + each) for each in range(pool.degree)] for at in range(more)]
    return "/".join("+".join(group) for group in (*own, *spare))


def _of_pool(cluster: PlannedCluster, pool: Pool) -> Options:
    """Settings that only the instances of this pool have, by the names of options."""
    given = {word.partition("=")[0].removeprefix("--") for word in cluster.own_options}
    all_settings = {**pool.mounted, **pool.settings}
    found = {name.replace("_", "-"): all_settings[name] for name in _SHARED if name in all_settings}
    settings = {name: value for name, value in found.items() if name not in given}
    if "transfer_kv_on_drain" in pool.settings:
        settings["transfer-kv-on-drain"] = "yes"
    if pool.degree > 1:
        settings["tensor-parallel"] = str(pool.degree)
    return settings


def _of_instances(pools: Sequence[Pool]) -> Options:
    """Settings that all instances share, or all of a service, by the names of options. Raises CliError."""
    shared: dict[str, str] = {}
    of_pools = [(pool, {**pool.mounted, **pool.settings}) for pool in pools]
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
    if any("transfer_kv_on_drain" in pool.settings for pool in pools):
        shared["transfer-kv-on-drain"] = "yes"
    degrees = {pool.degree for pool in pools if pool.service == "text"}
    if len(degrees) > 1:
        raise CliError("triptych up gives all text instances the same tensor-parallel degree", caller=True)
    if degrees - {1}:
        shared["tensor-parallel"] = str(degrees.pop())
    return shared
