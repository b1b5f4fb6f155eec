"""The choices that the engine has: to vLLM each is a request of its own."""

from collections.abc import Mapping
from dataclasses import dataclass

from triptych.machine.text.prefix_hashes import PrefixHashes


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice of a request."""

    request_id: str
    number: int
    name: str
    """Id outside of vLLM."""
    vllm_id: str
    """Id in vLLM."""
    alternatives: int | None
    """Number of log-probabilities to return per token."""
    prefixes: PrefixHashes | None
    """Prefix hashes; None if an item has no identity."""
    pauses: bool
    """Whether it pauses after its first token, which is not the last that it may have."""


class Choices:
    """Owner of which choices there are, and which are paused. Others only read its tables."""

    def __init__(self) -> None:
        self.by_name: dict[str, Choice] = {}
        self.by_request: dict[str, dict[int, Choice]] = {}
        """By request and number. No request is without a choice."""
        self.paused: set[str] = set()
        """Names of choices that get no further token: to vLLM they have ended."""

    def of(self, request_id: str) -> Mapping[int, Choice]:
        return self.by_request.get(request_id, {})

    def add(self, choice: Choice) -> None:
        self.by_name[choice.name] = choice
        self.by_request.setdefault(choice.request_id, {})[choice.number] = choice

    def remove(self, choice: Choice) -> None:
        del self.by_name[choice.name]
        self.paused.discard(choice.name)
        choices = self.by_request[choice.request_id]
        del choices[choice.number]
        if not choices:
            del self.by_request[choice.request_id]
