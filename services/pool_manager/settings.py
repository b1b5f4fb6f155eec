"""Settings of a pool manager."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from triptych.domain.limits import MAX_MESSAGE_NBYTES
from triptych.domain.scaling import PoolName, parse_kind
from triptych.integrations.kubernetes.settings import KubernetesSettings
from triptych.machine.pool_manager.members import MemberLimits
from triptych.machine.pool_manager.plan import ReplanLimits
from triptych.machine.pool_manager.pool import PoolLimits
from triptych.policy.addresses import why_not_called
from triptych.policy.scaling import ScalingLimits
from triptych.policy.switching import SwitchLimits
from triptych.rpc.settings import RpcServiceSettings
from triptych.runtime.settings import Strings, service_config
from triptych.store.leadership import LeaseTimes
from triptych.store.redis_settings import RedisSettings

from .batch_limits import BatchLimitsMode
from .limits import ControlLimits


class PoolManagerSettings(RpcServiceSettings):
    model_config = service_config("pool_manager")

    port: int = Field(default=50041, ge=0, le=65535)
    """TCP port to listen on; 0 picks a free one and logs it."""
    max_message_bytes: int = Field(default=1 << 20, ge=1 << 20, le=MAX_MESSAGE_NBYTES)
    """Largest message of a call."""
    admin_port: int = Field(default=0, ge=0, le=65535)
    """TCP port for /pools (the state of all pools as JSON), /health, /ready and /metrics; 0 opens none."""
    max_concurrent_calls: int = Field(default=16_384, ge=1)
    """Most calls at the same time: streams of members, of watchers, and queries."""

    members: MemberLimits = MemberLimits()
    """Number of members, and when silence counts."""
    max_watchers: int = Field(default=1024, ge=1)
    """Most routers and gateways that watch; one more is refused."""
    profiles: Path | None = None
    """Profiles of the models' parts: a directory as ``triptych profile`` writes it, or one file. Managers with one
    Redis share them."""
    host_devices: int = Field(default=0, ge=0, le=1024)
    """Accelerators of one host, for advice on which instances share one; 0 for none."""
    register_timeout_s: float = Field(default=5.0, gt=0, le=60)
    """Time for a member's registration, from the opening of its stream."""
    max_unregistered: int = Field(default=1024, ge=1)
    """Most streams that have not registered a member; one more ends the oldest of them. Members have one each besides."""
    min_report_interval_s: float = Field(default=0.02, ge=0, le=1)
    """Shortest time between two reports that are read from one member; a faster one is slowed down."""

    scaler: str = "none"
    """The scaler, which starts and stops instances: none, kubernetes, or HOST:PORT of a scaler in another process."""
    autoscale: bool = False
    """Carry out decisions on sizes. Without it they are only recorded, and sizes that were set by hand are carried out."""
    batch_limits: BatchLimitsMode = "set"
    """Limits of batches that profiles find better for the present mix: set them on running instances, with autoscale, or only advise."""
    roll_degrees: bool = False
    """Replace the instances of a pool, one by one, by such with the tensor-parallel degree that profiles find better, with autoscale. Without
    it that is only advised."""
    switch_roles: bool = False
    """Let instances switch roles as the load needs it: those that can (``switchable``), and serve one stage."""
    switching: SwitchLimits = SwitchLimits()
    """Speed and caution of that."""
    control: ControlLimits = ControlLimits()
    """Sizes that pools may have, and patience with the scaler."""
    scaling: ScalingLimits = ScalingLimits()
    """Speed and caution of autoscaling."""
    plan: Path | None = None
    """Plan to follow, a file of ``triptych plan --json``: pools stay within its devices, and it is said when another placement would be
    better for the mix of requests."""
    replan: bool = False
    """Move to such a placement: by switching roles, and with autoscale by starting and stopping instances. Plans then decide on sizes."""
    replanning: ReplanLimits = ReplanLimits()
    """Caution of that."""
    pools: PoolLimits = PoolLimits()
    """Patience with instances."""
    store: RedisSettings = RedisSettings()
    """Redis, if several managers share what they decide."""
    lease: LeaseTimes = LeaseTimes()
    """Times of the lease by which one of them leads."""
    kubernetes: KubernetesSettings = KubernetesSettings()
    """Access to Kubernetes, for the scaler kubernetes."""
    deployments: Strings = ()
    """The Deployment of each pool, as MODEL/ROLE[@TIER]=DEPLOYMENT, comma-separated, for the scaler kubernetes."""

    @property
    def named_deployments(self) -> dict[PoolName, str]:
        """Raises ValueError."""
        return dict(map(_deployment, self.deployments))

    @model_validator(mode="after")
    def _scaler_is_whole(self) -> Self:
        deployments = self.named_deployments
        if self.store.redis_tls and self.tls.files is None:
            raise ValueError("redis_tls needs tls_cert, tls_key and tls_ca")
        if self.autoscale and self.scaler == "none":
            raise ValueError("autoscale needs a scaler: set scaler")
        if self.replan and self.plan is None:
            raise ValueError("replan needs a plan to follow: set plan")
        if self.scaler == "kubernetes" and not deployments:
            raise ValueError("the scaler kubernetes needs deployments")
        if self.scaler != "kubernetes" and deployments:
            raise ValueError("deployments needs the scaler kubernetes")
        if self.scaler not in ("none", "kubernetes"):
            reason = why_not_called(self.scaler, beyond_loopback=self.reaches_network)
            if reason is not None:
                raise ValueError(f"scaler {self.scaler!r} is not none, kubernetes, or HOST:PORT: {reason}")
        return self


def _deployment(entry: str) -> tuple[PoolName, str]:
    pool, _, deployment = entry.partition("=")
    model, _, kind = pool.rpartition("/")
    try:
        if model and deployment:
            return PoolName(model, *parse_kind(kind)), deployment
    except ValueError:
        pass
    raise ValueError(f"deployments {entry!r} is not MODEL/ROLE[@TIER]=DEPLOYMENT")
