"""Groups of settings: frozen dataclasses, each declared with what keeps to it, whose numbers have their bounds in the type."""

from dataclasses import fields
from typing import Annotated, Any, get_type_hints

from triptych.domain.bounds import Between

Count = Annotated[int, Between(0)]
Positive = Annotated[int, Between(1)]
Seconds = Annotated[float, Between(0)]
PositiveSeconds = Annotated[float, Between(0, above=True)]


def check_limits(limits: Any, *ordered: tuple[str, str]) -> None:
    """Call it in ``__post_init__``. The first setting of each pair in ``ordered`` may not exceed the second.

    Raises ValueError, which names the first that is out of its bounds.
    """
    hints = get_type_hints(type(limits), include_extras=True)
    for name in (field.name for field in fields(limits)):
        value = getattr(limits, name)
        for bound in getattr(hints[name], "__metadata__", ()) if value is not None else ():
            if (fault := bound.fault(name, value)) is not None:
                raise ValueError(fault)
    for low, high in ordered:
        if getattr(limits, low) > getattr(limits, high):
            raise ValueError(f"{low} ({getattr(limits, low)}) exceeds {high} ({getattr(limits, high)})")
