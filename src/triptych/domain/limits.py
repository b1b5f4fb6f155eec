"""Groups of settings: frozen dataclasses, declared in the modules that enforce them, with bounds in the field types."""

from dataclasses import fields
from typing import Annotated, Any, get_type_hints

from triptych.domain.bounds import Between

MAX_MESSAGE_NBYTES = 256 << 20
"""Limit of one message between processes, and so of one item; services have tighter limits with better errors."""

Count = Annotated[int, Between(0)]
Positive = Annotated[int, Between(1)]
Seconds = Annotated[float, Between(0)]
PositiveSeconds = Annotated[float, Between(0, above=True)]
Ratio = Annotated[float, Between(0, above=True)]
Share = Annotated[float, Between(0, 1)]


def check_limits(limits: Any, *ordered: tuple[str, str]) -> None:
    """Call it in ``__post_init__``. Raises ValueError naming the first setting out of bounds.

    The first setting of each pair in ``ordered`` must not exceed the second, where both are set.
    """
    hints = get_type_hints(type(limits), include_extras=True)
    for name in (field.name for field in fields(limits)):
        value = getattr(limits, name)
        for bound in getattr(hints[name], "__metadata__", ()) if value is not None else ():
            if (fault := bound.fault(name, value)) is not None:
                raise ValueError(fault)
    for low, high in ordered:
        least, most = getattr(limits, low), getattr(limits, high)
        if least is not None and most is not None and least > most:
            raise ValueError(f"{low} ({least}) exceeds {high} ({most})")
