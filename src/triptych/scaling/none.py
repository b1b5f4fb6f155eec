"""No scaler: sizes are declared and shown, and somebody else acts on them."""

from triptych.domain.scaling import PoolName, ScaledPool
from triptych.errors import Deposed, InvalidRequest

_MAX_POOLS = 1024


class NoScaler:
    """``ports.Scaler`` that only remembers what was declared. It knows of no instances."""

    def __init__(self, *, max_size: int = 1024) -> None:
        self._max_size = max_size
        self._wanted: dict[PoolName, int] = {}
        self._token = 0

    async def scale(self, pool: PoolName, size: int, token: int) -> None:
        if not 0 <= size <= self._max_size:
            raise InvalidRequest(f"the size of pool {pool} is {size}, it must be 0 to {self._max_size}")
        if pool not in self._wanted and len(self._wanted) >= _MAX_POOLS:
            raise InvalidRequest(f"there are {len(self._wanted)} pools, the limit is {_MAX_POOLS}")
        self._check(token)
        self._wanted[pool] = size

    async def remove(self, pool: PoolName, instance: str, token: int) -> None:
        """Accepted and not carried out."""
        del pool, instance
        self._check(token)

    async def set_degree(self, pool: PoolName, degree: int, token: int) -> None:
        """Raises InvalidRequest: nobody would start them."""
        del degree
        self._check(token)
        raise InvalidRequest(f"no scaler is configured: nobody starts instances of pool {pool} with another degree")

    async def pools(self) -> tuple[ScaledPool, ...]:
        fault = "no scaler is configured: sizes are recommendations"
        return tuple(ScaledPool(pool, wanted, (), fault) for pool, wanted in self._wanted.items())

    async def close(self) -> None:
        """Do nothing: there is nothing to stop."""

    def _check(self, token: int) -> None:
        if token < self._token:
            raise Deposed(f"the order's token is {token}, a later leader has {self._token}")
        self._token = token
