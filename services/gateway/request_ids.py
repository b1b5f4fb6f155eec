"""The names of a request: what ``x-request-id`` says, and the answer's ``id``, which has one of OpenAI's prefixes before it."""

CHAT_PREFIX = "chatcmpl-"
COMPLETION_PREFIX = "cmpl-"


def canonical(request_id: str) -> str:
    """Both names of a request, ``x-request-id`` and the answer's ``id``, lead to the one the router knows."""
    return request_id.removeprefix(CHAT_PREFIX).removeprefix(COMPLETION_PREFIX)
