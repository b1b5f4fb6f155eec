"""Calls that each kind of process may make, by the names in their certificates."""

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc.aio

from triptych.errors import PermissionDenied
from triptych.runtime.logs import BoundedWarnings
from triptych.runtime.tls import GATEWAY, INSTANCE, OPERATOR, POOL_MANAGER, ROUTER, TlsIdentity

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

OPERATORS = frozenset({OPERATOR, POOL_MANAGER})
"""Operators may work in a pool manager's container."""

_EVERYONE: frozenset[str] = frozenset()

CALLERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "/triptych.v1.Calls/Exchange": _EVERYONE,  # each call on the stream is checked by itself
        "/triptych.v1.Router/Chat": _EVERYONE,
        "/triptych.v1.Router/Models": _EVERYONE,
        "/triptych.v1.Router/GetTimeline": _EVERYONE,
        "/triptych.v1.Router/Tokenize": _EVERYONE,
        "/triptych.v1.Router/Readiness": _EVERYONE,
        "/triptych.v1.Router/Resolve": _EVERYONE,
        "/triptych.v1.Router/LoadLora": OPERATORS | {GATEWAY},  # which lets only operators' keys do it
        "/triptych.v1.Router/UnloadLora": OPERATORS | {GATEWAY},
        "/triptych.v1.Instance/Describe": frozenset({ROUTER, INSTANCE}),
        "/triptych.v1.Instance/WatchLoad": frozenset({ROUTER}),
        "/triptych.v1.Instance/LoadLora": OPERATORS | {ROUTER},
        "/triptych.v1.Instance/UnloadLora": OPERATORS | {ROUTER},
        "/triptych.v1.Encoder/Encode": frozenset({ROUTER}),
        "/triptych.v1.Encoder/Lease": frozenset({ROUTER}),
        "/triptych.v1.Encoder/Release": frozenset({ROUTER, INSTANCE}),
        "/triptych.v1.Text/Generate": frozenset({ROUTER}),
        "/triptych.v1.PoolManager/Attend": frozenset({ROUTER, INSTANCE}),
        "/triptych.v1.PoolManager/Watch": frozenset({ROUTER, GATEWAY}),
        "/triptych.v1.PoolManager/Status": _EVERYONE,
        # Members drain themselves before they are stopped; the pool manager refuses it to them for others.
        "/triptych.v1.PoolManager/Drain": OPERATORS | {ROUTER, INSTANCE},
        "/triptych.v1.PoolManager/Switch": OPERATORS,
        "/triptych.v1.PoolManager/SetLimits": OPERATORS,
        "/triptych.v1.PoolManager/SetSize": OPERATORS,
        "/triptych.v1.PoolManager/Roll": OPERATORS,
        "/triptych.v1.Scaler/Scale": frozenset({POOL_MANAGER}),
        "/triptych.v1.Scaler/Remove": frozenset({POOL_MANAGER}),
        "/triptych.v1.Scaler/SetDegree": frozenset({POOL_MANAGER}),
        "/triptych.v1.Scaler/Pools": frozenset({POOL_MANAGER}),
    }
)
"""Kinds of callers by rpc path; empty means everyone with a certificate. Every method of ``triptych.v1`` is listed."""


class Authorization:
    """``CALLERS`` under an identity with ``tls_name``. Without one every certificate of the authority may call everything."""

    def __init__(self, tls: TlsIdentity | None) -> None:
        self._tls = tls
        self._refusals = BoundedWarnings(logger)

    def check_of(self, method: str) -> Callable[[Context], None] | None:
        """The check of a caller of ``method``, one of ``CALLERS``: it raises as ``require``. None if everyone may call it."""
        kinds = CALLERS[method]
        return None if self._tls is None or not kinds else partial(self.require, kinds, method)

    def require(self, kinds: Collection[str], what: str, context: Context) -> None:
        """Raises PermissionDenied unless the caller is of one of these kinds, and logs it for each kind of caller. ``what`` it
        calls begins with the rpc path.
        """
        if self._tls is None:
            return
        names = [name.decode(errors="replace") for name in context.auth_context().get("peer_dns", ())]
        if not self._tls.admits(names, kinds):
            name = what.rpartition("/")[2]
            wanted = " or ".join(sorted(str(self._tls.name_of(kind)) for kind in kinds))
            caller = " and ".join(sorted(self._tls.kinds_of(names))) or "no kind of process"
            message = f"{what} refused a caller whose certificate is for {caller}: it needs one for {wanted}"
            self._refusals.warn(message, kind=(what, caller))
            raise PermissionDenied(f"{name} needs a certificate for {wanted}")


def host_of(context: Context) -> str:
    """The address that the caller connects from, without its port."""
    return context.peer().rpartition(":")[0]


def ip_of(context: Context) -> str:
    """The IP address that the caller connects from."""
    return unquote(host_of(context)).partition(":")[2].removeprefix("[").removesuffix("]")
