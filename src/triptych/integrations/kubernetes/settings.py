"""Settings of the Kubernetes API, apart from its client: they can be read without it."""

import re
from dataclasses import dataclass
from pathlib import Path

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """Settings of the access to the Kubernetes API. The defaults are those of a pod with a service account."""

    kubernetes_api: str = "https://kubernetes.default.svc"
    """URL of the API server."""
    kubernetes_namespace: str = "default"
    """Namespace of the Deployments."""
    kubernetes_token_file: Path = _ACCOUNT / "token"
    """Token of the service account. Read for each call, as it is replaced regularly."""
    kubernetes_ca_file: Path = _ACCOUNT / "ca.crt"
    """CA certificates (PEM) that sign the API server's certificate."""
    kubernetes_timeout_s: float = 5.0
    """Longest time of a call; a third of it for TCP and for TLS each."""

    def __post_init__(self) -> None:
        if re.fullmatch(r"https?://[A-Za-z0-9.:\[\]-]+/?", self.kubernetes_api) is None:
            raise ValueError(f"kubernetes_api {self.kubernetes_api!r} is not a URL of a server")
        if re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", self.kubernetes_namespace) is None:
            raise ValueError(f"kubernetes_namespace {self.kubernetes_namespace!r} is not a name of Kubernetes")
        if not 0.1 <= self.kubernetes_timeout_s <= 60:
            raise ValueError(f"kubernetes_timeout_s {self.kubernetes_timeout_s:g} must be 0.1 to 60")
