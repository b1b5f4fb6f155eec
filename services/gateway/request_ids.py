"""Request ids: ``x-request-id``, and the answer's ``id``, which is the same with one of OpenAI's prefixes."""

CHAT_PREFIX = "chatcmpl-"
COMPLETION_PREFIX = "cmpl-"


def canonical(request_id: str) -> str:
    """The router's id of a request, from ``x-request-id`` or the answer's ``id``."""
    return request_id.removeprefix(CHAT_PREFIX).removeprefix(COMPLETION_PREFIX)
