"""Conversion of orders to a scaler, and of what it reports."""

from triptych.domain.scaling import PoolName, ScaledInstance, ScaledPool
from triptych.errors import InvalidRequest
from triptych.v1 import scaler_pb2
from triptych.wire.flat import Pair

MAX_POOLS = 1024
MAX_INSTANCES = 4096
"""Most instances of one pool."""
_MAX_NAME = 512
_MAX_REASON = 4096

_NAME = Pair(PoolName, scaler_pb2.PoolName)
_POOL = Pair(ScaledPool, scaler_pb2.ScaledPool, nested=(_NAME, Pair(ScaledInstance, scaler_pb2.ScaledInstance)))


def scale_to_wire(pool: PoolName, size: int, token: int) -> scaler_pb2.ScaleRequest:
    return scaler_pb2.ScaleRequest(pool=_NAME.to_wire(pool), size=size, token=token)


def scale_from_wire(message: scaler_pb2.ScaleRequest) -> tuple[PoolName, int, int]:
    """Pool, size and fencing token. Raises InvalidRequest for an unknown role."""
    return _NAME.from_wire(message.pool), message.size, message.token


def remove_to_wire(pool: PoolName, instance: str, token: int) -> scaler_pb2.RemoveRequest:
    return scaler_pb2.RemoveRequest(pool=_NAME.to_wire(pool), instance=instance, token=token)


def remove_from_wire(message: scaler_pb2.RemoveRequest) -> tuple[PoolName, str, int]:
    """Pool, instance and fencing token. Raises InvalidRequest for an unknown role."""
    return _NAME.from_wire(message.pool), message.instance, message.token


def degree_to_wire(pool: PoolName, degree: int, token: int) -> scaler_pb2.SetDegreeRequest:
    return scaler_pb2.SetDegreeRequest(pool=_NAME.to_wire(pool), degree=degree, token=token)


def degree_from_wire(message: scaler_pb2.SetDegreeRequest) -> tuple[PoolName, int, int]:
    """Pool, degree and fencing token. Raises InvalidRequest for an unknown role."""
    return _NAME.from_wire(message.pool), message.degree, message.token


def pools_to_wire(pools: tuple[ScaledPool, ...]) -> scaler_pb2.ScaledPools:
    return scaler_pb2.ScaledPools(pools=map(_POOL.to_wire, pools))


def pools_from_wire(message: scaler_pb2.ScaledPools) -> tuple[ScaledPool, ...]:
    """Raises InvalidRequest for an unknown enum value, a name or a text that is too long, or too many of them."""
    if len(message.pools) > MAX_POOLS:
        raise InvalidRequest(f"a scaler has {len(message.pools)} pools, the limit is {MAX_POOLS}", param="pools")
    for pool in message.pools:
        if len(pool.instances) > MAX_INSTANCES:
            fault = f"a pool has {len(pool.instances)} instances, the limit is {MAX_INSTANCES}"
            raise InvalidRequest(fault, param="pools")
        names = (pool.name.model, pool.name.tier, *(instance.name for instance in pool.instances))
        reasons = (pool.fault, *(instance.reason for instance in pool.instances))
        if max(map(len, names)) > _MAX_NAME or max(map(len, reasons)) > _MAX_REASON:
            raise InvalidRequest("a name or reason is too long", param="pools")
    pools = tuple(map(_POOL.from_wire, message.pools))
    if len({pool.name for pool in pools}) < len(pools):
        raise InvalidRequest("a pool is named twice", param="pools")
    return pools
