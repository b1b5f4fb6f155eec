"""Responses that the gateway keeps in memory for a while, so that conversations can go on by their ids."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from triptych.domain.chat import MediaPart, Message
from triptych.domain.limits import Seconds
from triptych.errors import InvalidRequest, NotFound
from triptych.ports import Clock

from .openai_models import MAX_MESSAGES

_ENTRY_NBYTES = 1024
"""Counted for each response, message, part and call beside its bytes."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of stored responses; the least recently used of the key that would hold most goes first."""

    max_stored_responses: int = 4096
    """Most responses that are stored; 0 stores none."""
    max_stored_bytes: int = 256 << 20
    """Most bytes of stored responses, with the images of their requests."""
    stored_response_s: float = 3600.0
    """Time after its last use for which a response is stored."""

    def __post_init__(self) -> None:
        for name in ("max_stored_responses", "max_stored_bytes", "stored_response_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must not be negative or infinite")


@dataclass(slots=True)
class Stored:
    """A response. ``body`` is its JSON, ``messages`` are those of its request, and the answer."""

    body: bytes
    messages: tuple[Message, ...]
    answer: Message
    previous: str = ""
    """Id of the response before; empty for none."""
    used_s: Seconds = 0.0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = len(self.body) + nbytes_of((*self.messages, self.answer))


class ResponseStore:
    """Owner of stored responses, by owner and id. No owner finds another's."""

    def __init__(self, limits: StoreLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._stored: OrderedDict[tuple[str, str], Stored] = OrderedDict()
        """Least recently used first."""
        self._nbytes: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        """Bytes and responses by owner."""

    @property
    def count(self) -> int:
        return len(self._stored)

    @property
    def nbytes(self) -> int:
        return self._nbytes.total()

    def has(self, owner: str, response_id: str) -> bool:
        return (owner, response_id) in self._stored

    def get(self, owner: str, response_id: str) -> Stored:
        """Raises NotFound, also for another owner's."""
        stored = self._find(owner, response_id)
        if stored is None:
            raise NotFound(f"there is no response {response_id[:100]!r}, or none any more", param="response_id")
        return stored

    def delete(self, owner: str, response_id: str) -> None:
        """Raises NotFound."""
        self.get(owner, response_id)
        self._drop((owner, response_id))

    def conversation(self, owner: str, response_id: str) -> tuple[Message, ...]:
        """The messages up to a response, its answer included; none without an id. Raises InvalidRequest if one of its responses is not stored."""
        turns: list[Message] = []
        at = response_id
        while at:
            stored = self._find(owner, at)
            if stored is None or len(turns) > MAX_MESSAGES:
                reason = (
                    f"response {at[:100]!r} is not stored, or not any more" if stored is None else "too many messages"
                )
                raise InvalidRequest(f"previous_response_id: {reason}", param="previous_response_id")
            turns += (stored.answer, *reversed(stored.messages))
            at = stored.previous
        return tuple(reversed(turns))

    def put(self, owner: str, response_id: str, stored: Stored) -> bool:
        """Store a response of an id that is not taken. Returns whether there is room for it."""
        self._expire()
        victims = self._victims(owner, stored.nbytes)
        if victims is None:
            return False
        for key in victims:
            self._drop(key)
        stored.used_s = self._clock()
        self._stored[owner, response_id] = stored
        self._nbytes[owner] += stored.nbytes
        self._counts[owner] += 1
        return True

    def _victims(self, owner: str, nbytes: int) -> list[tuple[str, str]] | None:
        """The responses in whose place an owner's new one fits; None if it alone would make its owner hold most."""
        sizes, counts = self._nbytes.copy(), self._counts.copy()
        sizes[owner] += nbytes
        counts[owner] += 1
        oldest: dict[str, Iterator[tuple[str, str]]] = {}
        victims: list[tuple[str, str]] = []
        while True:
            if sizes.total() > self._limits.max_stored_bytes:
                held = sizes
            elif counts.total() > self._limits.max_stored_responses:
                held = counts
            else:
                return victims
            has_older = counts[owner] > 1
            # Of owners that hold the same, the one that stores gives way if it can.
            loser = max(held, key=lambda name: (held[name], (name == owner) is has_older))
            if loser == owner and not has_older:
                return None
            if loser not in oldest:
                oldest[loser] = self._of(loser)
            key = next(oldest[loser])
            victims.append(key)
            sizes[loser] -= self._stored[key].nbytes
            counts[loser] -= 1

    def _of(self, owner: str) -> Iterator[tuple[str, str]]:
        """An owner's responses, least recently used first."""
        return (key for key in self._stored if key[0] == owner)

    def _find(self, owner: str, response_id: str) -> Stored | None:
        self._expire()
        stored = self._stored.get((owner, response_id))
        if stored is not None:
            stored.used_s = self._clock()
            self._stored.move_to_end((owner, response_id))
        return stored

    def _expire(self) -> None:
        oldest_s = self._clock() - self._limits.stored_response_s
        for key in list(self._expired(oldest_s)):
            self._drop(key)

    def _expired(self, oldest_s: Seconds) -> Iterator[tuple[str, str]]:
        for key, stored in self._stored.items():
            if stored.used_s > oldest_s:
                return
            yield key

    def _drop(self, key: tuple[str, str]) -> None:
        owner = key[0]
        self._nbytes[owner] -= self._stored.pop(key).nbytes
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._nbytes[owner], self._counts[owner]


def nbytes_of(messages: Iterable[Message]) -> int:
    """Bytes that messages hold, about: four per character of text."""
    nbytes = _ENTRY_NBYTES
    for message in messages:
        texts = [message.reasoning]
        for call in message.tool_calls:
            nbytes += _ENTRY_NBYTES
            texts += (call.call_id, call.name, call.arguments)
        for part in message.parts:
            nbytes += _ENTRY_NBYTES
            if isinstance(part, MediaPart):
                nbytes += len(part.data)
            else:
                texts.append(part.text)
        nbytes += 4 * sum(map(len, texts)) + _ENTRY_NBYTES
    return nbytes
