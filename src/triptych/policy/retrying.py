"""When to retry: exponential backoff with jitter, as a pure function."""

from hashlib import blake2b


def pause_s(request_id: str, refusals: int, *, first_s: float, longest_s: float) -> float:
    """The pause in seconds after the n-th refusal (from 1): doubled each time, then reduced by up to half as jitter.

    The jitter is a hash of the request id and n: requests refused together retry at different times, and a simulation
    repeats exactly.
    """
    digest = blake2b(f"{request_id}/{refusals}".encode(), digest_size=8).digest()
    share = int.from_bytes(digest, "big") / 2**64
    whole_s = min(first_s * (1 << min(refusals - 1, 30)), longest_s)
    return whole_s * (1 - share / 2)
