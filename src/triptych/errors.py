"""The error tree: every error of Triptych, with its gRPC code and HTTP status.

    TriptychError
    +-- InvalidRequest          INVALID_ARGUMENT     400  the request is invalid
    |   +-- InvalidMedia        INVALID_ARGUMENT     400  an item has the wrong type, is damaged, or out of bounds
    |   +-- ContextTooLong      INVALID_ARGUMENT     400  prompt and answer do not fit the model's context
    |   +-- UriTooLong          INVALID_ARGUMENT     414  only in HTTP, like the next three
    |   +-- UnsupportedEncoding INVALID_ARGUMENT     415  the body is compressed
    |   +-- ExpectationFailed   INVALID_ARGUMENT     417  the Expect header is not supported
    |   +-- HeadersTooLarge     INVALID_ARGUMENT     431  headers, trailers or chunk extensions are too large
    +-- Unauthenticated         UNAUTHENTICATED      401
    +-- PermissionDenied        PERMISSION_DENIED    403
    +-- NotFound                NOT_FOUND            404
    |   +-- ModelNotFound       NOT_FOUND            404
    |   +-- LeaseLost           NOT_FOUND            404  the embedding or the lease on it is gone: encode again
    +-- Conflict                ABORTED              409  what a write depends on has changed: read it again
    |   +-- Deposed             ABORTED              409  the lease under which an order was given is not held any more
    +-- FailedPrecondition      FAILED_PRECONDITION  409  something else must be done first
    +-- RequestTooLarge         OUT_OF_RANGE         413  the body exceeds the server's limit
    +-- RequestTimeout          DEADLINE_EXCEEDED    408  the caller did not send its request in time
    +-- Overloaded              RESOURCE_EXHAUSTED   429  a limit is reached; the same request may succeed later
    |   +-- ArenaFull           RESOURCE_EXHAUSTED   429  no registered memory for this embedding now
    |   +-- RateLimited         RESOURCE_EXHAUSTED   429  the caller's own limit is reached
    +-- Cancelled               CANCELLED            499  the client disconnected
    +-- InternalError           INTERNAL             500  a bug; details are in the server's log only
    |   +-- EngineFailure       INTERNAL             500  the engine failed on this request
    |   +-- StoreCorrupt        INTERNAL             500  the store has data that this program did not write
    +-- Unavailable             UNAVAILABLE          503  an instance is down, draining or not started yet
    |   +-- InstanceLost        UNAVAILABLE          503  the instance died or the connection to it broke
    |   +-- TransferFailed      UNAVAILABLE          503  embeddings could not be pulled; names the items
    |   +-- StageClosed         UNAVAILABLE          503  the instance has switched to other stages; nothing was done
    |   +-- StoreUnavailable    UNAVAILABLE          503  the store of the control plane does not answer
    +-- DeadlineExceeded        DEADLINE_EXCEEDED    504

The class tells the *caller* what it can do. ``retryable`` means that the same call may succeed later. Messages name
the value and its limit, never an address, a path or a stack. gRPC codes are given by name, so that this module does
not import grpc.
"""

from typing import ClassVar


class TriptychError(Exception):
    """Base class; only subclasses are raised."""

    code: ClassVar[str] = "internal_error"
    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """The request field at fault, as the client named it (``messages[0].content[1]``), if there is one."""
        self.sent_by_peer = False
        """Whether a peer said so. Else it was found on this side, as a connection that broke is."""
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s
        """Seconds to wait before a retry, if known."""


class InvalidRequest(TriptychError):
    """The request is invalid and can never succeed."""

    code, grpc_code, http_status = "invalid_request", "INVALID_ARGUMENT", 400


class InvalidMedia(InvalidRequest):
    """An item has the wrong type, is damaged, or is out of bounds."""

    code = "invalid_media"


class ContextTooLong(InvalidRequest):
    """Prompt and answer exceed the model's context."""

    code = "context_length_exceeded"


class UriTooLong(InvalidRequest):
    """The URI of an HTTP request is too long."""

    code, http_status = "uri_too_long", 414


class UnsupportedEncoding(InvalidRequest):
    """The body of an HTTP request is compressed or otherwise encoded."""

    code, http_status = "unsupported_encoding", 415


class ExpectationFailed(InvalidRequest):
    """The ``Expect`` header of an HTTP request is not supported."""

    code, http_status = "expectation_failed", 417


class HeadersTooLarge(InvalidRequest):
    """An HTTP request has too many or too large headers."""

    code, http_status = "headers_too_large", 431


class Unauthenticated(TriptychError):
    """The call has no valid credentials."""

    code, grpc_code, http_status = "invalid_api_key", "UNAUTHENTICATED", 401


class PermissionDenied(TriptychError):
    """The credentials do not permit this."""

    code, grpc_code, http_status = "permission_denied", "PERMISSION_DENIED", 403


class NotFound(TriptychError):
    """A thing that the call names does not exist."""

    code, grpc_code, http_status = "not_found", "NOT_FOUND", 404


class ModelNotFound(NotFound):
    """No instance serves the requested model."""

    code = "model_not_found"


class LeaseLost(NotFound):
    """The embedding or its lease is gone: the item must be encoded again."""

    code = "lease_lost"


class Conflict(TriptychError):
    """A value that a write depends on has changed: read it again."""

    code, grpc_code, http_status = "conflict", "ABORTED", 409


class Deposed(Conflict):
    """The lease under which an order was given is not held any more, or by another process: do not repeat it."""

    code = "deposed"


class FailedPrecondition(TriptychError):
    """The state of the cluster does not permit this: something else must be done first."""

    code, grpc_code, http_status = "failed_precondition", "FAILED_PRECONDITION", 409


class RequestTooLarge(TriptychError):
    """The body exceeds the server's limit."""

    code, grpc_code, http_status = "request_too_large", "OUT_OF_RANGE", 413


class RequestTimeout(TriptychError):
    """The caller did not send its request in time."""

    code, grpc_code, http_status = "request_timeout", "DEADLINE_EXCEEDED", 408


class Overloaded(TriptychError):
    """A limit of the server is reached; the same request may succeed later."""

    code, grpc_code, http_status, retryable = "overloaded", "RESOURCE_EXHAUSTED", 429, True
    default_retry_after_s = 1.0


class ArenaFull(Overloaded):
    """The arena has no room for this embedding now."""

    code = "arena_full"


class RateLimited(Overloaded):
    """A limit of this caller is reached, regardless of the server's load."""

    code = "rate_limit_exceeded"


class Cancelled(TriptychError):
    """The client disconnected or cancelled."""

    code, grpc_code, http_status = "cancelled", "CANCELLED", 499


class InternalError(TriptychError):
    """A defect of the server. Details are only in its log."""


class EngineFailure(InternalError):
    """The engine failed on this request; others are not affected."""

    code = "engine_failure"


class StoreCorrupt(InternalError):
    """The store has data that this program did not write, under the names that it uses."""

    code = "store_corrupt"


class Unavailable(TriptychError):
    """An instance is down, draining, or not started yet."""

    code, grpc_code, http_status, retryable = "unavailable", "UNAVAILABLE", 503, True


class InstanceLost(Unavailable):
    """The instance died, or the connection to it broke, during the call."""

    code = "instance_lost"


class TransferFailed(Unavailable):
    """Embeddings could not be pulled: the named items must be encoded again.

    ``items`` are indices of the request's placements; each shard of a large item is one.
    """

    code = "transfer_failed"

    def __init__(
        self,
        message: str,
        *,
        items: tuple[int, ...] = (),
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.items = items


class StageClosed(Unavailable):
    """The instance has switched and does not serve the stage any more, or has unloaded the request's LoRA adapter. Nothing was done:
    another one can.
    """

    code = "stage_closed"


class StoreUnavailable(Unavailable):
    """The store of the control plane does not answer, or refuses. The outcome of a write is then unknown."""

    code = "store_unavailable"


class DeadlineExceeded(TriptychError):
    """The caller's deadline has passed."""

    code, grpc_code, http_status, retryable = "deadline_exceeded", "DEADLINE_EXCEEDED", 504, True


def tree() -> dict[str, type[TriptychError]]:
    """Every class by its ``code``. The root handles unknown codes."""
    found: dict[str, type[TriptychError]] = {}
    pending: list[type[TriptychError]] = list(TriptychError.__subclasses__())
    while pending:
        cls = pending.pop()
        found[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return found
