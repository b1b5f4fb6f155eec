"""The error tree: everything Triptych refuses or fails with, and how each is said on gRPC and HTTP.

    TriptychError
    +-- InvalidRequest          INVALID_ARGUMENT     400  the request can never succeed as it stands
    |   +-- InvalidMedia        INVALID_ARGUMENT     400  an item is not what its type says, or out of bounds
    |   +-- ContextTooLong      INVALID_ARGUMENT     400  prompt and answer do not fit the model's context
    |   +-- UriTooLong          INVALID_ARGUMENT     414  of HTTP alone, as are the next three
    |   +-- UnsupportedEncoding INVALID_ARGUMENT     415  the body is compressed
    |   +-- ExpectationFailed   INVALID_ARGUMENT     417  the header Expect asks for what is not known
    |   +-- HeadersTooLarge     INVALID_ARGUMENT     431  headers, trailers or chunk extensions are too large
    +-- Unauthenticated         UNAUTHENTICATED      401
    +-- PermissionDenied        PERMISSION_DENIED    403
    +-- NotFound                NOT_FOUND            404
    |   +-- ModelNotFound       NOT_FOUND            404
    |   +-- LeaseLost           NOT_FOUND            404  the embedding or the lease on it is gone: encode again
    +-- RequestTooLarge         OUT_OF_RANGE         413  the body is larger than the server takes
    +-- RequestTimeout          DEADLINE_EXCEEDED    408  the caller did not send its request in time
    +-- Overloaded              RESOURCE_EXHAUSTED   429  a bound is reached; the same request may succeed later
    |   +-- ArenaFull           RESOURCE_EXHAUSTED   429  no registered memory for this embedding now
    |   +-- RateLimited         RESOURCE_EXHAUSTED   429  the caller's own limit is reached
    +-- Cancelled               CANCELLED            499  the caller went away
    +-- InternalError           INTERNAL             500  a defect; details are in the server's log only
    |   +-- EngineFailure       INTERNAL             500  the engine failed on this request
    +-- Unavailable             UNAVAILABLE          503  an instance is down, draining or not there yet
    |   +-- InstanceLost        UNAVAILABLE          503  the instance died or the link to it broke
    |   +-- TransferFailed      UNAVAILABLE          503  embeddings could not be pulled; names the items
    +-- DeadlineExceeded        DEADLINE_EXCEEDED    504

A class is chosen for what the *caller* can do about it. ``retryable`` says that the same call may succeed when it
is made again. Messages name the thing, its value and its limit, never an address, a path or a stack. The gRPC code
is given by name so that this module, at the bottom of the tree, needs no grpc.
"""

from typing import ClassVar


class TriptychError(Exception):
    """Root of the tree; raised only through its subclasses."""

    code: ClassVar[str] = "internal_error"
    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """The request field at fault, in the caller's own words (``messages[0].content[1]``), if there is one."""
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s
        """How long to wait before the same call is worth making again, in seconds, if that is known."""


class InvalidRequest(TriptychError):
    """The request can never succeed as it stands."""

    code, grpc_code, http_status = "invalid_request", "INVALID_ARGUMENT", 400


class InvalidMedia(InvalidRequest):
    """An item is not what its type says it is, or is out of bounds."""

    code = "invalid_media"


class ContextTooLong(InvalidRequest):
    """Prompt and answer do not fit the model's context."""

    code = "context_length_exceeded"


class UriTooLong(InvalidRequest):
    """The URI of an HTTP request is longer than the server takes."""

    code, http_status = "uri_too_long", 414


class UnsupportedEncoding(InvalidRequest):
    """The body of an HTTP request is compressed or has another encoding that is not undone."""

    code, http_status = "unsupported_encoding", 415


class ExpectationFailed(InvalidRequest):
    """The header ``Expect`` of an HTTP request asks for something that is not known."""

    code, http_status = "expectation_failed", 417


class HeadersTooLarge(InvalidRequest):
    """The headers of an HTTP request are larger, or more, than the server takes."""

    code, http_status = "headers_too_large", 431


class Unauthenticated(TriptychError):
    """No valid credentials came with the call."""

    code, grpc_code, http_status = "invalid_api_key", "UNAUTHENTICATED", 401


class PermissionDenied(TriptychError):
    """The credentials are valid, but not for this."""

    code, grpc_code, http_status = "permission_denied", "PERMISSION_DENIED", 403


class NotFound(TriptychError):
    """The thing that the call names is not there."""

    code, grpc_code, http_status = "not_found", "NOT_FOUND", 404


class ModelNotFound(NotFound):
    """No instance serves the model that the request names."""

    code = "model_not_found"


class LeaseLost(NotFound):
    """The embedding, or the lease on it, is gone: the item must be encoded again."""

    code = "lease_lost"


class RequestTooLarge(TriptychError):
    """The body is larger than the server takes."""

    code, grpc_code, http_status = "request_too_large", "OUT_OF_RANGE", 413


class RequestTimeout(TriptychError):
    """The caller did not send its request in time."""

    code, grpc_code, http_status = "request_timeout", "DEADLINE_EXCEEDED", 408


class Overloaded(TriptychError):
    """A bound of the server is reached; the same request may succeed later."""

    code, grpc_code, http_status, retryable = "overloaded", "RESOURCE_EXHAUSTED", 429, True
    default_retry_after_s = 1.0


class ArenaFull(Overloaded):
    """No registered memory is left for this embedding now."""

    code = "arena_full"


class RateLimited(Overloaded):
    """A limit of this caller is reached, whatever the server could still take."""

    code = "rate_limit_exceeded"


class Cancelled(TriptychError):
    """The caller went away."""

    code, grpc_code, http_status = "cancelled", "CANCELLED", 499


class InternalError(TriptychError):
    """A defect of the server; the details are in its log only."""


class EngineFailure(InternalError):
    """The engine failed on this request; others are not affected."""

    code = "engine_failure"


class Unavailable(TriptychError):
    """An instance is down, draining, or not there yet."""

    code, grpc_code, http_status, retryable = "unavailable", "UNAVAILABLE", 503, True


class InstanceLost(Unavailable):
    """The instance died, or the link to it broke, while it worked on the call."""

    code = "instance_lost"


class TransferFailed(Unavailable):
    """Embeddings could not be pulled: encode the named items again.

    ``items`` are numbers of the request's placements, of which each shard of a large item is one.
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
        """Indices, within the request, of the items whose embeddings did not arrive."""


class DeadlineExceeded(TriptychError):
    """The time that the caller gave is over."""

    code, grpc_code, http_status, retryable = "deadline_exceeded", "DEADLINE_EXCEEDED", 504, True


def tree() -> dict[str, type[TriptychError]]:
    """Every class of the tree by its ``code``; the root stands in for codes that nobody knows."""
    found: dict[str, type[TriptychError]] = {}
    pending: list[type[TriptychError]] = list(TriptychError.__subclasses__())
    while pending:
        cls = pending.pop()
        found[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return found
