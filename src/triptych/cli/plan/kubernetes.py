"""A kustomize overlay with the pools of a plan, in place of the encoders and text instances of the base.

Each pool is a Deployment made from that of the base, with a label of its own in its selector: the scaler finds the pods of a pool by
it. Devices are chosen by node labels, as NVIDIA's feature discovery sets them.
"""

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

from triptych.cli.outcome import CliError
from triptych.cli.plan.cluster import PlannedCluster, Pool, variables
from triptych.cli.plan.followed import PLAN, PROFILES, manager_settings
from triptych.cli.plan.manifests import Document, as_yaml, checked_images, is_demo, model_directory, read_documents

_PROFILES_MAP, _PLAN_MAP = "triptych-profiles", "triptych-plan"
_MAX_NBYTES = 1_000_000
"""A ConfigMap has at most 1 MiB."""
_PRODUCT = "nvidia.com/gpu.product"
_GPU = "nvidia.com/gpu"
_MEMORY = {"encoder": "32Gi", "text": "64Gi"}
"""Memory of an instance on a GPU, as of the component ``gpu``."""
_READERS = {"pool-manager": "StatefulSet", "router": "Deployment"}
"""Workloads that read profiles."""


def overlay(
    cluster: PlannedCluster, base: Path, directory: Path, profiles: Sequence[Path], followed: Mapping[str, str]
) -> Mapping[str, str]:
    """The files of the overlay by name, for a directory. ``base``: that of the repository. ``profiles``: files that lie in ``profiles``
    there. ``followed``: those of a plan that the pool manager follows. Raises CliError.
    """
    checked_images(cluster)
    if sum(path.stat().st_size for path in profiles) > _MAX_NBYTES:
        raise CliError("the profiles of the plan are too large for a ConfigMap: measure them with --quick", caller=True)
    if sum(len(text.encode()) for text in followed.values()) > _MAX_NBYTES:
        raise CliError("the plan is too large for a ConfigMap: make it with fewer --candidates", caller=True)
    pools = [_deployment(cluster, pool, _of_base(base, pool.service)) for pool in cluster.pools]
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "triptych",
        "resources": [_way(directory, base), "pools.yaml"],
        **({"components": [_way(directory, base.parent / "components" / "demo-model")]} if is_demo(cluster) else {}),
        "configMapGenerator": list(_config_maps(cluster, profiles, followed)),
        "patches": [*_patches(cluster), *_mounts(cluster, follows=bool(followed))],
    }
    return {
        "kustomization.yaml": as_yaml(
            kustomization, comment=f"{cluster.placement}: kubectl apply --kustomize, after the Secrets"
        ),
        "pools.yaml": as_yaml(*pools),
    }


def deployment_name(pool: Pool) -> str:
    return f"triptych-{pool.kind.name.replace('.', '-')}-pool"


def _of_base(base: Path, service: str) -> Document:
    """The Deployment of a service. Raises CliError."""
    path = base / f"{service}.yaml"
    found = [
        document
        for document in read_documents(path)
        if isinstance(document, dict) and document.get("kind") == "Deployment"
    ]
    if len(found) != 1:
        raise CliError(f"{path} has {len(found)} Deployments, not one", caller=True)
    return deepcopy(found[0])


def _deployment(cluster: PlannedCluster, pool: Pool, document: Document) -> Document:
    """The base's Deployment as that of a pool. With autoscaling it begins with one pod, and applying it again must not reset the size."""
    labels = {**document["spec"]["selector"]["matchLabels"], "role": pool.kind.name}
    spec = document["spec"] if cluster.autoscale else {"replicas": pool.count, **document["spec"]}
    spec["selector"] = {"matchLabels": labels}
    pod = spec["template"]["spec"]
    spec["template"] = {"metadata": {"labels": labels}, "spec": pod}
    for spread in pod["topologySpreadConstraints"]:
        spread["labelSelector"] = {"matchLabels": labels}
    (container,) = pod["containers"]
    container["env"] += [{"name": key, "value": value.replace("$(", "$$(")} for key, value in pool.environment.items()]
    if is_demo(cluster):
        container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != "models"]
        pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "models"]
    needed: dict[str, str] = {"cpu": str(pool.cores)}
    if pool.on_gpu:
        needed |= {"memory": _MEMORY[pool.service], _GPU: str(pool.degree)}
        spec["strategy"] = {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}  # there may be no GPU to spare
        pod["nodeSelector"] = {_PRODUCT: pool.device.hardware[0].replace(" ", "-")}
        pod["tolerations"] = [{"key": _GPU, "operator": "Exists", "effect": "NoSchedule"}]
    container["image"] = f"triptych-{pool.service}:{version('triptych')}{'-cuda' if pool.on_gpu else ''}"
    for kind in ("requests", "limits"):
        container["resources"][kind] |= needed
    metadata = {"name": deployment_name(pool), "labels": labels}
    return {"apiVersion": document["apiVersion"], "kind": document["kind"], "metadata": metadata, "spec": spec}


def _config_maps(cluster: PlannedCluster, profiles: Sequence[Path], followed: Mapping[str, str]) -> Sequence[Document]:
    manager = {
        "pool_sizes": "" if followed else cluster.pool_sizes,  # a plan has them
        **manager_settings(cluster),
        "autoscale": str(cluster.autoscale).lower(),
        "switch_roles": str(cluster.placement.switch_roles).lower(),
    }
    settings = {
        "pool-manager": variables("pool_manager", manager),
        "router": variables("router", {**cluster.settings["router"], "profiles": PROFILES}),
        "gateway": variables("gateway", cluster.settings["gateway"]),
    }
    if not is_demo(cluster):
        settings["model"] = {"MODEL_ID": cluster.model_id, "MODEL_DIRECTORY": model_directory(cluster)}
    maps = [
        {
            "name": f"triptych-{name}-settings",
            "behavior": "merge",
            "literals": [f"{key}={value}" for key, value in values.items()],
        }
        for name, values in settings.items()
        if values
    ]
    maps.append({"name": _PROFILES_MAP, "files": [f"profiles/{path.name}" for path in profiles]})
    return [*maps, {"name": _PLAN_MAP, "files": [*followed]}] if followed else maps


def _patches(cluster: PlannedCluster) -> list[Document]:
    """The base's own pools go, and the pool manager scales those of the plan."""
    names = [deployment_name(pool) for pool in cluster.pools]
    pools = ",".join(f"{cluster.model_id}/{pool.kind}={deployment_name(pool)}" for pool in cluster.pools)
    gone = [
        {"$patch": "delete", "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": f"triptych-{service}"}}
        for service in ("encoder", "text")
    ]
    manager = _workload("pool-manager", {"env": [{"name": "TRIPTYCH_POOL_MANAGER_DEPLOYMENTS", "value": pools}]})
    rights = [{"op": "replace", "path": "/rules/0/resourceNames", "value": names}]
    return [
        *({"patch": as_yaml(patch)} for patch in (*gone, manager)),
        {"target": {"kind": "Role", "name": "triptych-scaling"}, "patch": as_yaml(rights)},
    ]


def _mounts(cluster: PlannedCluster, *, follows: bool) -> list[Document]:
    """Profiles, and for the pool manager the plan that it follows, with the model, whose configuration a search reads."""
    volumes: dict[str, tuple[str, Document]] = {"profiles": (PROFILES, {"configMap": {"name": _PROFILES_MAP}})}
    followed: dict[str, tuple[str, Document]] = {"plan": (PLAN, {"configMap": {"name": _PLAN_MAP}})} if follows else {}
    if follows and not is_demo(cluster):
        followed["models"] = ("/models", {"persistentVolumeClaim": {"claimName": "triptych-models", "readOnly": True}})
    return [
        {"patch": as_yaml(_mounting(name, volumes | (followed if name == "pool-manager" else {})))} for name in _READERS
    ]


def _mounting(name: str, volumes: Mapping[str, tuple[str, Document]]) -> Document:
    """``volumes``: by name, the path in the container and what is mounted there."""
    mounts = [{"name": volume, "mountPath": path, "readOnly": True} for volume, (path, _) in volumes.items()]
    return _workload(
        name, {"volumeMounts": mounts}, volumes=[{"name": volume, **source} for volume, (_, source) in volumes.items()]
    )


def _workload(name: str, container: Mapping[str, Any], **pod: Any) -> Document:
    """A patch of a service's workload."""
    return {
        "apiVersion": "apps/v1",
        "kind": _READERS[name],
        "metadata": {"name": f"triptych-{name}"},
        "spec": {"template": {"spec": {"containers": [{"name": name, **container}], **pod}}},
    }


def _way(directory: Path, target: Path) -> str:
    """The relative path from the overlay."""
    return os.path.relpath(target.absolute(), directory.absolute())
