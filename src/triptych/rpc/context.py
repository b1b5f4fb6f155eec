"""What travels with every call beside its message: the request it belongs to, and the trace."""

from collections.abc import Iterable

from triptych.runtime import tracing
from triptych.runtime.logs import request_id

REQUEST_ID = "x-request-id"
_MAX_ID_CHARS = 128

Pairs = tuple[tuple[str, str], ...]


def outgoing(of_request: str = "") -> Pairs:
    """Metadata for a call made now; ``of_request`` where the message itself says which request it is for."""
    current = of_request or request_id.get()
    own: Pairs = ((REQUEST_ID, current),) if _is_id(current) else ()
    span = tracing.current()
    return own if span is None else (*own, *span.headers().items())


def incoming(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """The pairs of a call's metadata that mean something here; a request id that is none is left out."""
    found: dict[str, str] = {}
    for key, value in metadata or ():
        if key in tracing.HEADERS or (key == REQUEST_ID and _is_id(value)):
            found[key] = str(value)
    return found


def _is_id(value: str | bytes) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_ID_CHARS and value.isascii() and value.isprintable()
