"""When a request counts as having come, so that tenants share a queue by their weights.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM '96): a request begins, in service over weight, where its tenant's last
request ends, or where the queue is if that is later. So what an idle tenant has not used is not saved up. How far it begins
ahead of the queue is the time after which the tenant's share has room for it. Within ``BURST_S`` it is within the share.
What is within every tenant's share goes by priority and objective as it does without tenants; what is beyond counts as
having come later, behind all that is within.
"""

from typing import NamedTuple, Protocol

from triptych.domain.queue_position import AGEING_S, QueuePosition

RESERVED_SHARE = 8
"""Reserved share: one of so many places of an engine, and of its KV blocks, is left to requests within the shares of their tenants."""

BURST_S = 1.0
"""Work that a tenant may want at once without being beyond its share, in seconds of its share of the service."""

_LEAST_BEGUN = 2
"""Places that a step gives to requests beyond shares, however few there are: with one, short answers would not fill them."""


class Share(NamedTuple):
    """Effect of a tenant's share on a request's queue position."""

    behind_s: float = 0.0
    """How much later than it came it counts as having come; negative for earlier."""
    within: bool = False
    """Whether it is within the share, if there is another tenant."""

    def of(self, queue_position: QueuePosition) -> QueuePosition:
        return queue_position.behind(self.behind_s, within=self.within)


UNSHARED = Share()


class Fairness(Protocol):
    """The share of a request for which that of its tenant has room in ``ahead_s``."""

    def __call__(self, *, ahead_s: float) -> Share: ...


def by_weight(*, ahead_s: float) -> Share:
    """As no objective or deadline orders by more than ``AGEING_S``, what is beyond goes behind what is within."""
    within = ahead_s <= BURST_S
    return Share(ahead_s if within else ahead_s + AGEING_S, within)


def may_start(queue_position: QueuePosition, *, wanted: int, running: int, places: int, begun: int) -> bool:
    """Whether a step of an engine may start a request whose choices take ``wanted`` of its ``places``, of which ``running`` are taken.

    What runs is not interrupted, and a step ends when all of its prompts are computed. So requests beyond their tenants' shares,
    which have taken ``begun`` places in this step, take few in one step, and leave some free. The first is never held up by that alone.
    One with more choices than places, which came before there were so few, runs alone.
    """
    if running and running + wanted > places:
        return False
    if not queue_position.beyond_share or not running:
        return True
    reserved = places // RESERVED_SHARE
    return running + wanted <= places - reserved and (not begun or begun + wanted <= max(_LEAST_BEGUN, reserved))


def share_wait_s(*, ahead_s: float, own_s: float, more_urgent_s: float, share: float) -> float:
    """How long a tenant's request waits, given the times that the stage takes for the work that waits.

    ``ahead_s``: of all that has its priority or goes before it, which ``own_s`` of its tenant is part of. ``more_urgent_s``: of other
    tenants, with a priority that goes before. ``share``: the tenant's part of the service while all that wait go on waiting.
    """
    return min(ahead_s, more_urgent_s + own_s / share)
