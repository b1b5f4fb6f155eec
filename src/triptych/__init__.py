"""Triptych serves multimodal language models as three panels that scale apart: encode, prefill and decode.

``AsyncClient`` and ``Client`` are loaded when they are first used: services and ``triptych --help`` need no client.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.client import AsyncClient, Client

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> object:
    if name in ("AsyncClient", "Client"):
        from triptych import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
