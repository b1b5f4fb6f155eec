"""The SDK: ask a router over gRPC, asynchronously (``AsyncClient``) or not (``Client``). See docs/sdk.md.

It needs the base install only. Everything it raises is in ``triptych.errors``.
"""

from triptych.client.answers import Answer, Choice
from triptych.client.asynchronous import AsyncClient, ChatStream
from triptych.client.images import Image, Media
from triptych.client.messages import RawPrompt, assistant, system, tool, user
from triptych.client.retries import RetryPolicy
from triptych.client.synchronous import Client, SyncChatStream
from triptych.domain.chat import ToolCall, ToolChoice
from triptych.domain.resolving import ResolvedItem
from triptych.domain.tenant import Tenant
from triptych.runtime.tls import TlsIdentity

__all__ = [
    "Answer",
    "AsyncClient",
    "ChatStream",
    "Choice",
    "Client",
    "Image",
    "Media",
    "RawPrompt",
    "ResolvedItem",
    "RetryPolicy",
    "SyncChatStream",
    "Tenant",
    "TlsIdentity",
    "ToolCall",
    "ToolChoice",
    "assistant",
    "system",
    "tool",
    "user",
]
