"""When to try again: later and later, and not all at the same moment. A pure function."""

from hashlib import blake2b


def pause_s(request_id: str, refusals: int, *, first_s: float, longest_s: float) -> float:
    """The pause after so many refusals (from 1 on), in seconds: doubled each time, and cut by up to half.

    How much is cut is a hash of request and number, so that requests which were refused together come back apart,
    and the same request in the same run always at the same time.
    """
    digest = blake2b(f"{request_id}/{refusals}".encode(), digest_size=8).digest()
    share = int.from_bytes(digest, "big") / 2**64
    whole_s = min(first_s * (1 << min(refusals - 1, 30)), longest_s)
    return whole_s * (1 - share / 2)
