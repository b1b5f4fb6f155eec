"""The manifests of ``deploy/kubernetes``, rendered by kustomize, and what their pods see of them."""

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes"
IMAGES = ROOT / "deploy" / "images"
OVERLAYS = ("demo", "gpu")
COMPONENT = "app.kubernetes.io/component"
SERVICES = ("encoder", "text", "router", "gateway", "pool-manager")
"""Components that are services of Triptych."""

Document = dict[str, Any]


@cache
def _text(overlay: str) -> str:
    return _rendered(MANIFESTS / "overlays" / overlay)


def _rendered(directory: Path) -> str:
    if (kustomize := shutil.which("kustomize")) is not None:
        command = [kustomize, "build"]
    elif (kubectl := shutil.which("kubectl")) is not None:
        command = [kubectl, "kustomize"]
    else:
        pytest.skip("neither kustomize nor kubectl is on the PATH: the manifests for Kubernetes are not tested")
    done = subprocess.run([*command, str(directory)], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(overlay: str) -> list[Document]:
    """All objects of an overlay, in the order in which they are to be applied."""
    return list(yaml.load_all(_text(overlay), yaml.CSafeLoader))


def kustomized(directory: Path) -> list[Document]:
    """All objects of a directory with a kustomization, in the order in which they are to be applied."""
    return list(yaml.load_all(_rendered(directory), yaml.CSafeLoader))


def workloads(documents: Iterable[Document]) -> dict[str, Document]:
    """Deployments and StatefulSets by their component."""
    found = [document for document in documents if document["kind"] in ("Deployment", "StatefulSet")]
    return {workload["metadata"]["labels"][COMPONENT]: workload for workload in found}


def of_kind(documents: Iterable[Document], kind: str) -> dict[str, Document]:
    """Objects of a kind by name."""
    return {document["metadata"]["name"]: document for document in documents if document["kind"] == kind}


def pod_of(workload: Document) -> Document:
    spec: Document = workload["spec"]["template"]["spec"]
    return spec


def container_of(workload: Document) -> Document:
    """The only container of a workload."""
    (container,) = pod_of(workload)["containers"]
    found: Document = container
    return found


@dataclass(frozen=True)
class PodIdentity:
    """What the downward API tells a pod of itself."""

    name: str
    ip: str
    namespace: str = "triptych"

    def field(self, path: str) -> str:
        return {"metadata.name": self.name, "status.podIP": self.ip, "metadata.namespace": self.namespace}[path]


def environment(container: Document, documents: Iterable[Document], pod: PodIdentity) -> dict[str, str]:
    """The environment of a container, as kubelets make it: ``env`` overrides ``envFrom``, and only earlier entries of ``env``
    are expanded.
    """
    maps: Mapping[str, Document] = of_kind(documents, "ConfigMap")
    taken: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        taken |= maps[source["configMapRef"]["name"]]["data"]
    known: dict[str, str] = {}
    for entry in container.get("env", ()):
        origin = entry.get("valueFrom")
        if origin is None:
            value = re.sub(r"\$\(([A-Z0-9_]+)\)", lambda match: known.get(match[1], match[0]), entry["value"])
        elif "fieldRef" in origin:
            value = pod.field(origin["fieldRef"]["fieldPath"])
        else:
            of_map = origin["configMapKeyRef"]
            value = maps[of_map["name"]]["data"][of_map["key"]]
        known[entry["name"]] = value
    return taken | known


def dockerfile(service: str) -> str:
    return (IMAGES / f"{service.replace('-', '_')}.Dockerfile").read_text()


def image_environment(service: str) -> dict[str, str]:
    """What the image of a service sets."""
    text = dockerfile(service)
    last_stage = text[text.rindex("\nFROM ") :]
    lines = re.findall(r"^ENV (.*)$", last_stage, re.MULTILINE)
    return dict(pair.split("=", 1) for line in lines for pair in line.split())


def selects(selector: Document, labels: Mapping[str, str]) -> bool:
    """Whether a label selector with ``In`` as its only operator selects an object."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    expressions = selector.get("matchExpressions", ())
    assert all(expression["operator"] == "In" for expression in expressions)
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )
