"""``TransportSet``: the backends of one process, and the choice of a working one for each holder."""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from triptych.domain.instance import TransportOffer
from triptych.errors import TransferFailed, TriptychError
from triptych.policy.transport import Endpoint, rank_backends
from triptych.ports import Peer, Transport
from triptych.transport.nixl_offer import offers_rdma

logger = logging.getLogger(__name__)

_MAX_OFFERS = 16


class TransportSet:
    """The backends of one process, over one arena."""

    def __init__(
        self, transports: Sequence[Transport], *, connect_timeout_s: float, preferred: str | None = None
    ) -> None:
        """``preferred`` is tried first. Raises ValueError for a duplicate or missing backend."""
        self._transports = {transport.backend: transport for transport in transports}
        if len(self._transports) != len(transports) or not transports:
            raise ValueError("a process needs at least one transport backend, and each only once")
        if preferred is not None and preferred not in self._transports:
            raise ValueError(f"transport {preferred!r} is preferred, but there are only {sorted(self._transports)}")
        self._connect_timeout_s = connect_timeout_s
        self._preferred = preferred

    @property
    def preferred(self) -> str | None:
        """The operator's choice, tried before the best-ranked backend."""
        return self._preferred

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(self._transports)

    def offers(self) -> tuple[TransportOffer, ...]:
        """Offers for readers, one per backend."""
        return tuple(transport.offer() for transport in self._transports.values())

    async def connect(self, offers: Sequence[TransportOffer]) -> Peer:
        """Connect to a holder over the best backend that works, proven by reading the holder's probe.

        Raises TransferFailed, listing what was tried, within ``connect_timeout_s``.
        """
        theirs = {offer.backend: offer for offer in offers[:_MAX_OFFERS]}
        ranked = rank_backends(_endpoints(self.offers()), _endpoints(theirs.values()), self._preferred)
        failures: list[str] = []
        for choice in ranked:
            try:
                # The time is shared, so that a backend that hangs leaves time for the next.
                async with asyncio.timeout(self._connect_timeout_s / len(ranked)):
                    peer = await self._transports[choice.backend].connect(theirs[choice.backend])
            except TimeoutError:
                failures.append(f"{choice.backend}: no answer in time")
            except TriptychError as error:
                failures.append(f"{choice.backend}: {error.message}")
            else:
                logger.info("reading a holder's memory over %s (%s)", choice.backend, choice.reason)
                return peer
        tried = "; ".join(failures) or "reader and holder have no transport in common"
        raise TransferFailed(f"the holder's memory could not be reached ({tried})")

    def quarantined(self) -> tuple[tuple[int, int], ...]:
        """Ranges of this process's arena that a late write of any backend may still reach."""
        return tuple(part for transport in self._transports.values() for part in transport.quarantined())

    async def close(self) -> None:
        for transport in self._transports.values():
            await transport.close()


def _endpoints(offers: Iterable[TransportOffer]) -> tuple[Endpoint, ...]:
    return tuple(Endpoint(offer.backend, offer.host, rdma=offers_rdma(offer)) for offer in offers)
