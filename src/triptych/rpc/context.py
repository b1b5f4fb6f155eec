"""Metadata of every call: the request id and the trace context."""

import re
from collections.abc import Iterable

from triptych.runtime import tracing
from triptych.runtime.logs import request_id

REQUEST_ID = "x-request-id"
_ID = re.compile(r"[ -~]{1,128}")

Pairs = tuple[tuple[str, str], ...]


def outgoing(of_request: str = "") -> Pairs:
    """Metadata for a new call; ``of_request`` is the request id if the message itself names it."""
    current = of_request or request_id.get()
    own_pairs: Pairs = ((REQUEST_ID, current),) if _ID.fullmatch(current) else ()
    span = tracing.current()
    return own_pairs if span is None else (*own_pairs, *span.headers().items())


def incoming(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """The relevant metadata of a call; an invalid request id is left out."""
    pairs: dict[str, str] = {}
    for key, value in metadata or ():
        if key in tracing.HEADERS or (key == REQUEST_ID and isinstance(value, str) and _ID.fullmatch(value)):
            pairs[key] = str(value)
    return pairs
