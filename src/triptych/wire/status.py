"""Conversion between the error tree and gRPC statuses."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from triptych import errors

_CODE_KEY = "triptych-code"
_PARAM_KEY = "triptych-param"
_RETRY_AFTER_KEY = "triptych-retry-after-s"
_ITEMS_KEY = "triptych-items"
_MAX_MESSAGE_CHARS = 1024
_MAX_ITEMS_NAMED = 512
"""Message and items become headers, which gRPC limits to 8 KiB together."""
_TREE = errors.tree()
_TLS_FAULT = re.compile(r"handshake failed.{0,200}OPENSSL_internal:([A-Z0-9_]{1,80})(?:: ([a-z ]{1,80}))?", re.ASCII)
_BROKEN = re.compile("Internal error from Core|RST_STREAM|Stream removed", re.ASCII)
"""Details that gRPC gives with INTERNAL or UNKNOWN of a stream that broke: at a write, by a reset, or with its
connection.
"""
LOST = "the connection to the instance was lost"
_FAILED = "the call failed with {}"
NOT_SERVED = _FAILED.format("UNIMPLEMENTED")
"""The peer is another service than the one that was called, or of another release."""
_BY_GRPC_CODE: Mapping[str, type[errors.TriptychError]] = {
    cls.grpc_code: cls
    for cls in (
        errors.InvalidRequest,
        errors.Unauthenticated,
        errors.PermissionDenied,
        errors.NotFound,
        errors.Cancelled,
        errors.InternalError,
    )
}


@dataclass(frozen=True, slots=True)
class Status:
    """An error as gRPC transports it: code name, message, and trailing metadata for the rest."""

    grpc_code: str
    message: str
    metadata: tuple[tuple[str, str], ...]


def error_to_status(error: errors.TriptychError) -> Status:
    metadata = [(_CODE_KEY, error.code)]
    if error.param is not None:
        metadata.append((_PARAM_KEY, error.param.encode("ascii", "backslashreplace").decode("ascii")))
    if error.retry_after_s is not None:
        metadata.append((_RETRY_AFTER_KEY, repr(error.retry_after_s)))
    if isinstance(error, errors.TransferFailed):
        metadata.append((_ITEMS_KEY, ",".join(map(str, error.items[:_MAX_ITEMS_NAMED]))))
    return Status(error.grpc_code, error.message[:_MAX_MESSAGE_CHARS], tuple(metadata))


def error_from_status(
    grpc_code: str, message: str, metadata: Iterable[tuple[str, str | bytes]]
) -> errors.TriptychError:
    """The error that a peer sent; for a foreign status, the class nearest to its gRPC code.

    A broken connection is UNAVAILABLE without our metadata (INTERNAL or UNKNOWN where gRPC notices it at a write or by a
    reset): that is an InstanceLost. gRPC's own messages contain addresses, so they are replaced.
    """
    texts = {key: value for key, value in metadata if isinstance(value, str)}
    cls = _TREE.get(texts.get(_CODE_KEY, ""))
    if cls is None:
        return _foreign_status(grpc_code, message)
    param = texts.get(_PARAM_KEY)
    retry_after_s = _float_or_none(texts.get(_RETRY_AFTER_KEY))
    if issubclass(cls, errors.TransferFailed):
        items = tuple(int(item) for item in texts.get(_ITEMS_KEY, "").split(",") if item.isdecimal())
        error: errors.TriptychError = cls(message, items=items, param=param, retry_after_s=retry_after_s)
    else:
        error = cls(message, param=param, retry_after_s=retry_after_s)
    error.sent_by_peer = True
    return error


def _lost(message: str) -> str:
    """Why there is no connection, from what gRPC says of it."""
    if (fault := _TLS_FAULT.search(message)) is not None:
        return f"the TLS handshake failed: {(fault[2] or fault[1].replace('_', ' ').lower()).strip()}"
    if "Hostname Verification Check failed" in message:
        return "the TLS handshake failed: the peer's certificate has another name"
    if "failed to connect" in message and "Socket closed" in message:
        return "the peer closes each connection: it may want TLS, or refuse the certificate"
    return LOST


def _foreign_status(grpc_code: str, message: str) -> errors.TriptychError:
    match grpc_code:
        case "UNAVAILABLE":
            return errors.InstanceLost(_lost(message))
        case "INTERNAL" | "UNKNOWN" if _BROKEN.search(message):
            return errors.InstanceLost(LOST)
        case "DEADLINE_EXCEEDED":
            return errors.DeadlineExceeded("the call did not end within its deadline")
        case "RESOURCE_EXHAUSTED" if "larger than max" in message:
            return errors.RequestTooLarge("the message exceeds the peer's limit")
        case "RESOURCE_EXHAUSTED":  # too many concurrent calls
            return errors.Overloaded("the peer has too many concurrent calls")
        case _:
            return _BY_GRPC_CODE.get(grpc_code, errors.InternalError)(_FAILED.format(grpc_code))


def _float_or_none(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
