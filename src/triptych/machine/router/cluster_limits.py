"""The limits of ``machine.router.cluster.ClusterMachine`` and its parts."""

from dataclasses import dataclass
from typing import Annotated

from triptych.domain.bounds import Between
from triptych.domain.limits import Count, Positive, PositiveSeconds, Seconds, check_limits


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """Limits of waiting requests and embedding hints, and timings of backoff."""

    max_waiting_requests: Count = 1024
    """Most requests that wait for room in the encoders' arenas."""
    max_embedding_hints: Count = 65_536
    """Most items whose encoder the router remembers, to reuse cached embeddings."""
    lost_after_s: Seconds = 5.0
    """A leaving instance that has not been reached for so long is forgotten once no call to it runs, whatever is held there."""
    pool_grace_s: Seconds = 1.0
    """How long requests wait for a pool without any instance before they fail."""
    first_backoff_s: PositiveSeconds = 1.0
    """First backoff of an instance that fails; it doubles with each one until the instance works again. An engine failure
    suffices. Others are preferred meanwhile, and after it the instance gets one item or request at a time."""
    longest_backoff_s: PositiveSeconds = 30.0
    """Longest backoff."""
    max_failures_in_row: Positive = 3
    """Broken calls in a row, or embeddings in a row that cannot be used, that lead to a backoff too."""
    max_backoff_share: Annotated[float, Between(0, 1)] = 0.5
    """Largest share of a pool in backoff at once, though one of two or more; never the last one."""
    outlier_factor: Annotated[float, Between(0, 10)] = 5.0
    """An encoder whose encodes take this many times as long as those of the median of the others, with as many pending tokens,
    is in backoff too; 0 for never."""
    retry_share: Annotated[float, Between(0, 1)] = 0.2
    """Items that may be encoded again after a loss or failure, for each item that is encoded. Beyond that requests fail ..."""
    retry_burst: Count = 1000
    """... except for this many, which are saved up. It should exceed the items that encoders lose when they die together."""
    hedge_share: Annotated[float, Between(0, 1)] = 0.05
    """Items that may be given to a second encoder because they take long, for each item that is encoded; 0 for none. An item
    takes long from the 99th percentile of the pool's times for items of its size on. The first answer is used."""
    lend_above: Count = 16
    """With policy lending=idle: encoders take text requests while more than this many wait, until fewer than half of it do ..."""
    max_lent: Positive = 8
    """... each at most this many at a time ..."""
    lent_patience_s: Seconds = 0.5
    """... which go elsewhere if they have no token yet when the encoder has had items for this long."""

    def __post_init__(self) -> None:
        check_limits(self, ("first_backoff_s", "longest_backoff_s"))
