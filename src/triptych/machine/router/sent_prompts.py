"""Contents of instances' prefix caches, as far as a router can tell: the prompts that it has sent them last."""

from collections import OrderedDict
from collections.abc import Collection, Sequence

_SHARE = 0.5
"""Of an instance's KV memory: the rest is that of answers, and of what other routers send."""
_MOST = 8192
"""Segments remembered of each instance, also if its memory is larger or unknown."""


class SentPrompts:
    """Owner of which prefixes of prompts instances have probably cached.

    Part of ``machine.router.known_prefixes.KnownPrefixes``. By the keys of whole segments, the latest ones of each instance.
    """

    def __init__(self) -> None:
        self._keys: dict[str, OrderedDict[bytes, None]] = {}

    def cached(self, name: str, keys: Sequence[bytes]) -> int:
        """How many of a prompt's segments, from the first on, the instance at this address has probably cached."""
        sent = self._keys.get(name, ())
        return next((at for at, key in enumerate(keys) if key not in sent), len(keys))

    def sent(self, name: str, keys: Sequence[bytes], segment_tokens: int, kv_tokens: int) -> None:
        """Note that an instance gets a prompt with these. ``kv_tokens`` is its KV memory; 0 if unknown."""
        known = self._keys.setdefault(name, OrderedDict())
        for key in reversed(keys):  # a cache evicts the end of a prompt before its beginning
            known[key] = None
            known.move_to_end(key)
        most = min(int(_SHARE * kv_tokens) // segment_tokens, _MOST) if kv_tokens else _MOST
        while len(known) > most:
            known.popitem(last=False)

    def keep(self, names: Collection[str]) -> None:
        """Forget all other instances."""
        for name in self._keys.keys() - set(names):
            del self._keys[name]
