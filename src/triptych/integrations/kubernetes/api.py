"""The calls of the Kubernetes API that the scaler needs, with a service account's token."""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from triptych.errors import Conflict, NotFound, PermissionDenied, TriptychError, Unavailable
from triptych.files import BadFile, read_text
from triptych.integrations.kubernetes.settings import KubernetesSettings

_MAX_TOKEN_NBYTES = 64 << 10
_PAGE = 500
_MAX_PODS = 5000
_MAX_LISTINGS = 3
_EXPIRED = 410
"""The HTTP status of a list that became too old between two pages."""
_MERGE = "application/merge-patch+json"

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation by which the ready pod with the lowest cost of a ReplicaSet is deleted first."""

_TEMPLATE_HASH = "pod-template-hash"
"""Label by which a Deployment tells the pods of one template from those of another."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A Deployment's scale subresource."""

    replicas: int
    observed: int
    """Pods that the controllers know of."""
    selector: str
    """Selector of its pods."""
    version: str


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    uid: str
    ready: bool
    deleting: bool
    failed: bool
    reason: str
    """Why it is not ready, if Kubernetes says so."""
    deletion_cost: str
    template: str
    """Hash of the template that it was made from; empty if it is of no Deployment."""


class KubernetesApi:
    """Kubernetes API. Every method raises Unavailable, PermissionDenied (naming the right that is missing), or what it
    says.
    """

    def __init__(self, settings: KubernetesSettings) -> None:
        """Raises ValueError when the file of CA certificates cannot be used."""
        try:
            context = ssl.create_default_context(cafile=str(settings.kubernetes_ca_file))
        except (OSError, ssl.SSLError):
            raise ValueError(f"the CA certificates cannot be read: {settings.kubernetes_ca_file}") from None
        self._token_file = settings.kubernetes_token_file
        self._timeout_s = settings.kubernetes_timeout_s
        namespace = settings.kubernetes_namespace
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._deployments = f"/apis/apps/v1/namespaces/{namespace}/deployments"
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._http = httpx.AsyncClient(
            base_url=settings.kubernetes_api,
            verify=context,
            # Connecting gives up on its own: httpcore leaks a socket whose TLS handshake is cancelled from outside.
            timeout=httpx.Timeout(settings.kubernetes_timeout_s, connect=settings.kubernetes_timeout_s / 3),
            limits=httpx.Limits(max_connections=4),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def scale(self, deployment: str) -> Scale:
        """Raises NotFound."""
        document = await self._call("get deployments/scale", "GET", f"{self._deployments}/{deployment}/scale")
        return Scale(
            int(document["spec"].get("replicas", 0)),
            int(document["status"].get("replicas", 0)),
            str(document["status"].get("selector", "")),
            str(document["metadata"]["resourceVersion"]),
        )

    async def set_replicas(self, deployment: str, replicas: int, version: str) -> None:
        """Raises Conflict if the Deployment has changed since ``version``."""
        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
        await self._call("patch deployments/scale", "PATCH", f"{self._deployments}/{deployment}/scale", body=body)

    async def pods(self, selector: str) -> list[Pod]:
        """Pods with these labels."""
        for _ in range(_MAX_LISTINGS):
            if (listing := await self._listing(selector)) is not None:
                return listing
        raise Unavailable("the list of pods changes faster than it can be read")

    async def mark(self, pod: str, cost: str) -> None:
        """Set a pod's deletion cost. Raises NotFound."""
        body = {"metadata": {"annotations": {DELETION_COST: cost}}}
        await self._call("patch pods", "PATCH", f"{self._pods}/{pod}", body=body)

    async def delete_pod(self, pod: str, uid: str) -> None:
        """Delete this very pod, which has its grace period. Raises NotFound, and Conflict if the name is another pod's."""
        await self._call("delete pods", "DELETE", f"{self._pods}/{pod}", body={"preconditions": {"uid": uid}})

    async def lease(self, name: str) -> tuple[dict[str, str], str]:
        """Annotations and version of a Lease. Raises NotFound."""
        document = await self._call("get leases", "GET", f"{self._leases}/{name}")
        return dict(document["metadata"].get("annotations") or {}), str(document["metadata"]["resourceVersion"])

    async def annotate_lease(self, name: str, annotations: Mapping[str, str], version: str) -> None:
        """Raises Conflict if the Lease has changed since ``version``."""
        body = {"metadata": {"resourceVersion": version, "annotations": dict(annotations)}}
        await self._call("patch leases", "PATCH", f"{self._leases}/{name}", body=body)

    # --- how ---

    async def _listing(self, selector: str) -> list[Pod] | None:
        """Read a listing. None if the list became too old between two pages: it must be read from the beginning."""
        pods: list[Pod] = []
        page = {"labelSelector": selector, "limit": str(_PAGE)}
        while True:
            status, document = await self._request("GET", self._pods, params=page)
            if status == _EXPIRED:
                return None
            if status is not None:
                raise _error(status, "list pods")
            pods += [_pod(item) for item in document["items"]]
            following = document["metadata"].get("continue")
            if not following:
                return pods
            if len(pods) >= _MAX_PODS:
                raise Unavailable(f"more than {_MAX_PODS} pods have these labels")
            page["continue"] = str(following)

    async def _call(self, right: str, method: str, path: str, *, body: Mapping[str, Any] | None = None) -> Any:
        status, answer = await self._request(method, path, body=body)
        if status is not None:
            raise _error(status, right)
        return answer

    async def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> tuple[int | None, Any]:
        """The HTTP status if it is an error's, and the answer if it is not."""
        try:
            async with asyncio.timeout(self._timeout_s):
                token = await asyncio.to_thread(self._token)
                headers = {"Authorization": f"Bearer {token}"}
                if body is not None:
                    headers["Content-Type"] = _MERGE if method == "PATCH" else "application/json"
                answer = await self._http.request(method, path, params=params, json=body, headers=headers)
                return (None, answer.json()) if answer.is_success else (answer.status_code, None)
        except (TimeoutError, httpx.TimeoutException):
            raise Unavailable(f"the Kubernetes API did not answer within {self._timeout_s:g} s") from None
        except (httpx.HTTPError, ValueError):
            raise Unavailable("the Kubernetes API cannot be reached") from None

    def _token(self) -> str:
        try:
            token = read_text(self._token_file, _MAX_TOKEN_NBYTES).strip()
        except BadFile as error:
            raise Unavailable(f"the token of the service account {error}") from None
        if not token.isascii():
            raise Unavailable("the token of the service account is not ASCII text")
        return token


def _error(status: int, right: str) -> TriptychError:
    match status:
        case 401:
            return PermissionDenied("the Kubernetes API does not accept the token of the service account")
        case 403:
            return PermissionDenied(f"the service account lacks a right: {right}")
        case 404:
            return NotFound(f"Kubernetes has no such object ({right})")
        case 409:
            return Conflict(f"the object has changed in Kubernetes ({right})")
        case _:
            return Unavailable(f"the Kubernetes API answers {status} ({right})")


def _pod(item: Mapping[str, Any]) -> Pod:
    metadata, status = item["metadata"], item.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    ready = conditions.get("Ready", {}).get("status") == "True"
    waiting = [
        (container.get("state") or {}).get("waiting") or {} for container in status.get("containerStatuses") or ()
    ]
    blocked = next((state["reason"] for state in waiting if state.get("reason") in _BLOCKED), "")
    unscheduled = conditions.get("PodScheduled", {})
    failed = bool(blocked) or status.get("phase") == "Failed"
    reason = blocked or str(status.get("reason") or "")
    if not reason and unscheduled.get("status") == "False":
        reason = str(unscheduled.get("reason") or "")
    return Pod(
        metadata["name"],
        metadata["uid"],
        ready,
        "deletionTimestamp" in metadata,
        failed,
        reason[:200],
        (metadata.get("annotations") or {}).get(DELETION_COST, ""),
        (metadata.get("labels") or {}).get(_TEMPLATE_HASH, ""),
    )


_BLOCKED = frozenset(
    {"CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "InvalidImageName", "CreateContainerConfigError"}
)
"""Reasons why a container does not start that do not pass by themselves."""
