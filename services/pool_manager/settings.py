"""Settings of a pool manager."""

from pydantic import Field

from triptych.domain.limits import MAX_MESSAGE_NBYTES
from triptych.machine.pool_manager.members import MemberLimits
from triptych.runtime.settings import RpcServiceSettings, service_config


class PoolManagerSettings(RpcServiceSettings):
    model_config = service_config("pool_manager")

    port: int = Field(default=50041, ge=0, le=65535)
    """TCP port to listen on; 0 picks a free one and logs it."""
    max_message_bytes: int = Field(default=1 << 20, ge=1 << 20, le=MAX_MESSAGE_NBYTES)
    """Largest message of a call."""
    max_concurrent_calls: int = Field(default=16_384, ge=1)
    """Most calls at the same time: streams of members, of watchers, and queries."""

    members: MemberLimits = MemberLimits()
    """Number of members, and when silence counts."""
    max_watchers: int = Field(default=1024, ge=1)
    """Most routers and gateways that watch; one more is refused."""
    max_instances: int = Field(default=64, ge=1, le=4096)
    """Largest size of a pool that is advised."""
    register_timeout_s: float = Field(default=5.0, gt=0, le=60)
    """Time for a member's registration, from the opening of its stream."""
    min_report_interval_s: float = Field(default=0.02, ge=0, le=1)
    """Shortest time between two reports that are read from one member; a faster one is slowed down."""
