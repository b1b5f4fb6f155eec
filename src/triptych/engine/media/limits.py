"""Limits of decoding, apart from what decodes: settings have them where no library of media is installed."""

from dataclasses import dataclass
from typing import Annotated

from triptych.domain.bounds import Between
from triptych.domain.limits import check_limits


@dataclass(frozen=True)
class DecodeLimits:
    """Limits of decoding one item, whatever its header says."""

    max_decode_s: Annotated[float, Between(0, 86_400, above=True)] = 120.0
    """Most CPU time that decoding one item may take; its decoder is killed then."""
    max_decode_bytes: Annotated[int, Between(64 << 20)] = 2 << 30
    """Most memory that decoding one item may take, beside that of an idle decoder."""

    def __post_init__(self) -> None:
        check_limits(self)
