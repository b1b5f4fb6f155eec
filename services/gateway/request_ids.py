"""Request ids: ``x-request-id``, and the answer's ``id``, which is the same with a prefix of its API."""

CHAT_PREFIX = "chatcmpl-"
COMPLETION_PREFIX = "cmpl-"
RESPONSE_PREFIX = "resp_"
MESSAGE_PREFIX = "msg_"


def canonical(request_id: str) -> str:
    """The router's id of a request, from ``x-request-id`` or the answer's ``id``."""
    for prefix in (CHAT_PREFIX, COMPLETION_PREFIX, RESPONSE_PREFIX, MESSAGE_PREFIX):
        if request_id.startswith(prefix):
            return request_id.removeprefix(prefix)
    return request_id
