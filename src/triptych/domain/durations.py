"""Durations as people read them."""

_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"))


def in_words(seconds: float) -> str:
    """``90 s``, ``30 min``, ``2 h``: rounded, in the largest unit of which there are two, or exactly one."""
    for unit_s, unit in _UNITS:
        if seconds >= 2 * unit_s or round(seconds) == unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"
