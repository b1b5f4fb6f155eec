"""When an instance would be done with one more item or request, from what it has to do and how fast it is.

An instance is a pipeline: what must be ready first (preprocessing of an item, pulls of a request's embeddings) overlaps
with what its engine has to do before. ``policy.speeds`` says how long each part takes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, Self

from triptych.domain.record import record


@record
class Held:
    """Where a request's embeddings are, in bytes."""

    by_instance: Mapping[str, int]
    """By the ids of their holders."""
    by_host: Mapping[str, int]
    nbytes: int
    """Bytes of all of them."""

    @classmethod
    def of(cls, holders: Mapping[str, int], hosts: Mapping[str, str]) -> Self:
        """``hosts`` are those of instances by their ids, as far as they are known."""
        by_host: Counter[str] = Counter()
        for holder, nbytes in holders.items():
            if host := hosts.get(holder):
                by_host[host] += nbytes
        return cls(holders, by_host, sum(holders.values()))


@record
class Work:
    """Work that one item asks of an encoder, or one request of a text instance."""

    tokens: int
    """Of the item, or of the prompt."""
    nbytes: int = 0
    """Arena space of the item's embedding."""
    media_nbytes: int = 0
    pixels: int = 0
    """Of an image or of a video's frames; samples of a sound."""
    answer_tokens: int = 0
    """Expected of the answer, for each choice."""
    held: Held | None = None
    """Where the request's embeddings are; None without any."""


NO_WORK = Work(0)


class Alone(NamedTuple):
    """Time that some work takes at an instance, in seconds, whatever that has to do besides."""

    idle_s: float
    """In an engine that has nothing else to do."""
    beside_s: float
    """In an engine that batches it with others."""
    steps: float = 0.0
    """Steps of the engine in which others decode as well."""
    ready_s: float = 0.0
    """Before the engine can begin: preprocessing on one core."""
    core_s: float = 0.0
    """By how much that delays what is preprocessed later."""


class Speed(Protocol):
    """How fast an instance is. Instances of one profile share one, so that work is priced once for all of them."""

    def alone(self, work: Work) -> Alone: ...

    def pull_s(self, near_nbytes: int, far_nbytes: int) -> float:
        """To pull so many bytes from holders on the same host, and on others; 0 where it is not known."""
        ...


class Price:
    """Price of one piece of work at instances of one speed."""

    __slots__ = ("_pulls", "_speed", "alone", "far_pull_s", "held", "near_pull_s", "unqueued_s")

    def __init__(self, speed: Speed, work: Work) -> None:
        self.alone = speed.alone(work)
        self.unqueued_s = self.alone.ready_s + self.alone.idle_s
        self.near_pull_s = speed.pull_s(work.nbytes, 0) if work.nbytes else 0.0
        """Of the item's embedding, by a text instance on the same host."""
        self.far_pull_s = speed.pull_s(0, work.nbytes) if work.nbytes else 0.0
        self.held = work.held
        self._speed = speed
        self._pulls: dict[tuple[int, int], float] = {}

    def pull_s(self, near_nbytes: int, far_nbytes: int) -> float:
        found = self._pulls.get((near_nbytes, far_nbytes))
        if found is None:
            found = self._pulls[near_nbytes, far_nbytes] = self._speed.pull_s(near_nbytes, far_nbytes)
        return found


class EncodeBacklog(NamedTuple):
    """Work that an encoder has to do, in predicted seconds."""

    speed: Speed
    wait_s: float = 0.0
    """Until its engine has encoded the items that it has."""
    prepared_s: float = 0.0
    """Until they all are preprocessed."""
    slowness: float = 1.0
    """The instance's times as multiples of what ``speed`` says."""
    near_text: bool = False
    """Whether a text instance is on its host."""
    text_wait_s: float | None = None
    """``TextBacklog.wait_s``, if it is a text instance as well, which need not pull what is encoded there."""

    @staticmethod
    def ends_s(backlogs: "Sequence[EncodeBacklog | None]", prices: "Prices") -> list[float] | None:
        """When an item would be encoded at each, and its embedding be at a text instance."""
        ends: list[float] = []
        last: Speed | None = None
        for backlog in backlogs:
            if backlog is None:
                return None
            speed, wait_s, prepared_s, slowness, near_text, text_wait_s = backlog
            if speed is not last:  # mostly all are equally fast
                last, price = speed, prices[speed]
                beside_s, unqueued_s = price.alone.beside_s, price.unqueued_s
            queued_s, prepared_s = wait_s + beside_s, prepared_s + unqueued_s
            pull_s = price.near_pull_s if near_text else price.far_pull_s
            pull_s = pull_s if text_wait_s is None else min(pull_s, text_wait_s)
            ends.append(slowness * max(queued_s, prepared_s) + pull_s)
        return ends

    def tolerated_s(self, price: Price) -> float:
        """How much later the end may be where the embedding is believed to be: if it is not, no more than this is lost."""
        return self.slowness * price.alone.idle_s

    def with_item(self, price: Price) -> "EncodeBacklog":
        """A copy with one more item."""
        alone = price.alone
        return self._replace(
            wait_s=max(self.wait_s + alone.beside_s, alone.idle_s),
            prepared_s=self.prepared_s + alone.core_s,
        )


class TextBacklog(NamedTuple):
    """Work that a text instance has to do, in predicted seconds."""

    speed: Speed
    wait_s: float = 0.0
    """Until it can begin with another prompt."""
    step_s: float = 0.0
    """One step of its engine with one sequence more than it has; 0 if unknown."""
    slowness: float = 1.0
    """The instance's waits and prefills as multiples of what ``speed`` says."""
    instance_id: str = ""
    host: str = ""
    """Empty if unknown."""

    @staticmethod
    def ends_s(backlogs: "Sequence[TextBacklog | None]", prices: "Prices") -> list[float] | None:
        """When a request's answer would be complete at each; up to its first token if nothing is known of decoding there."""
        ends: list[float] = []
        last: Speed | None = None
        for backlog in backlogs:
            if backlog is None:
                return None
            speed, wait_s, step_s, slowness, instance_id, host = backlog
            if speed is not last:  # mostly all are equally fast
                last, price = speed, prices[speed]
                idle_s, steps, held = price.alone.idle_s, price.alone.steps, price.held
            if held is not None:
                own = held.by_instance.get(instance_id, 0)
                near = max(own, held.by_host.get(host, 0))
                wait_s = max(wait_s, price.pull_s(near - own, held.nbytes - near))
            ends.append(slowness * (wait_s + idle_s) + steps * step_s)
        return ends


Backlog = EncodeBacklog | TextBacklog


class Prices(dict[Speed, Price]):
    """Prices of one piece of work, by the speed of the instance."""

    __slots__ = ("work",)

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __missing__(self, speed: Speed) -> Price:
        price = self[speed] = Price(speed, self.work)
        return price


def ends_s(backlogs: Sequence[Backlog | None], prices: Prices) -> list[float] | None:
    """When each of a pool's instances would be done with this work; None if that is not known of all."""
    if not backlogs or backlogs[0] is None:
        return None if backlogs else []
    return backlogs[0].ends_s(backlogs, prices)  # type: ignore[arg-type]  # all of one kind
