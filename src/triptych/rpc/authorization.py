"""Which kinds of processes may call what, by the names in their certificates."""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import grpc.aio

from triptych.errors import PermissionDenied
from triptych.runtime.logs import BoundedWarnings
from triptych.runtime.tls import GATEWAY, INSTANCE, OPERATOR, POOL_MANAGER, ROUTER, TlsIdentity

logger = logging.getLogger(__name__)

_EVERYONE: frozenset[str] = frozenset()

CALLERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "/triptych.v1.Calls/Exchange": _EVERYONE,  # each call on the stream is checked by itself
        "/triptych.v1.Router/Chat": _EVERYONE,
        "/triptych.v1.Router/Models": _EVERYONE,
        "/triptych.v1.Router/GetTimeline": _EVERYONE,
        "/triptych.v1.Router/Tokenize": _EVERYONE,
        "/triptych.v1.Router/Readiness": _EVERYONE,
        "/triptych.v1.Instance/Describe": frozenset({ROUTER, INSTANCE}),
        "/triptych.v1.Instance/WatchLoad": frozenset({ROUTER}),
        "/triptych.v1.Encoder/Encode": frozenset({ROUTER}),
        "/triptych.v1.Encoder/Lease": frozenset({ROUTER}),
        "/triptych.v1.Encoder/Release": frozenset({ROUTER, INSTANCE}),
        "/triptych.v1.Text/Generate": frozenset({ROUTER}),
        "/triptych.v1.PoolManager/Attend": frozenset({ROUTER, INSTANCE}),
        "/triptych.v1.PoolManager/Watch": frozenset({ROUTER, GATEWAY}),
        "/triptych.v1.PoolManager/Status": _EVERYONE,
        # Members drain themselves before they are stopped. Operators may work in a pool manager's container.
        "/triptych.v1.PoolManager/Drain": frozenset({OPERATOR, POOL_MANAGER, ROUTER, INSTANCE}),
        "/triptych.v1.PoolManager/SetSize": frozenset({OPERATOR, POOL_MANAGER}),
        "/triptych.v1.Scaler/Scale": frozenset({POOL_MANAGER}),
        "/triptych.v1.Scaler/Remove": frozenset({POOL_MANAGER}),
        "/triptych.v1.Scaler/Pools": frozenset({POOL_MANAGER}),
    }
)
"""By rpc path; empty means everyone with a certificate. Every method of ``triptych.v1`` is listed."""


class Authorization:
    """``CALLERS`` under an identity with ``tls_name``. Without one every certificate of the authority may call everything."""

    def __init__(self, tls: TlsIdentity | None) -> None:
        self._tls = tls
        self._refusals = BoundedWarnings(logger)

    def check(self, method: str, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """``method`` is one of ``CALLERS``. Raises PermissionDenied, and logs it for each method and kind of caller."""
        kinds = CALLERS[method]
        if self._tls is None or not kinds:
            return
        names = [name.decode(errors="replace") for name in context.auth_context().get("peer_dns", ())]
        if not self._tls.admits(names, kinds):
            name = method.rpartition("/")[2]
            wanted = " or ".join(sorted(str(self._tls.name_of(kind)) for kind in kinds))
            caller = " and ".join(sorted(self._tls.kinds_of(names))) or "no kind of process"
            message = f"{method} refused a caller whose certificate is for {caller}: it needs one for {wanted}"
            self._refusals.warn(message, kind=(method, caller))
            raise PermissionDenied(f"{name} needs a certificate for {wanted}")
