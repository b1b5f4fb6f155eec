"""Limit of the files, connections included, that this process may have open at once."""

import resource

_WANTED = 65_536


def allow_many() -> None:
    """Raise the limit that applies (often 1,024, fewer than a gateway has connections) as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def allowed() -> int | None:
    """The limit that applies; None if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
