"""The scenario that is simulated: a model on instances of devices, the settings of the services, and what happens to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from triptych.domain.instance import ModelInfo
from triptych.domain.profile import Profile
from triptych.domain.scaling import Kind
from triptych.domain.stage import ModelPart, Role
from triptych.families.base import Family
from triptych.policy.iteration import ImageBudget
from triptych.ports import Replanner
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.services.router.settings import RouterSettings
from triptych.services.text.settings import TextSettings

from .host import Host
from .network import Hosts, LinkSpeed, Topology
from .outcome import Busy, InstanceUse
from .shared_device import Sharing

BYTES_PER_PIXEL = 0.3
"""Of undecoded images and frames, usually."""


@dataclass(frozen=True, slots=True)
class InstanceKind:
    """Hardware that the instances of one pool run on, and what their parts cost there."""

    device: str
    """Name in the catalogue, or of the hardware that a profile was measured on."""
    devices: int
    """Devices of each instance: the tensor-parallel degree. 0 of encoders on those of other instances."""
    profiles: Mapping[ModelPart, Profile]
    prepare_cores: int
    """Cores that decode and preprocess items, of each instance that encodes."""
    copied_bytes_per_s: float
    """Between the memory of the devices and that of the host, for keys and values."""
    link: LinkSpeed
    """By which each instance sends and receives: one link for each direction."""
    within_host: LinkSpeed
    """The same between instances of one host, where the deployment has hosts."""

    def use(self, name: str, role: Role, start_s: float, end_s: float, busy_s: Mapping[Busy, float]) -> InstanceUse:
        """What an instance did. ``busy_s``: with each kind of work, of all preparing cores together."""
        shares = {work: spent_s / (self.prepare_cores if work == "prepare" else 1) for work, spent_s in busy_s.items()}
        return InstanceUse(name, role.value, self.device, self.devices, start_s, end_s, shares)


@dataclass(frozen=True, slots=True)
class Fault:
    """An event that happens to an instance."""

    at_s: float
    instance: str
    what: Literal["kill", "start", "hang", "go-on"]


@dataclass(frozen=True, slots=True)
class Deployment:
    """A cluster of one model, as ``triptych up`` would start it. Pools are those of a role, or of a role and tier."""

    model: ModelInfo
    family: Family
    sizes: Mapping[Kind, int]
    """Instances by pool at the start."""
    kinds: Mapping[Kind, InstanceKind]
    router: RouterSettings
    encoder: EncoderSettings
    texts: Mapping[Kind, TextSettings]
    """By pool; not of E, unless roles switch."""
    manager: PoolManagerSettings
    image_budgets: Mapping[Kind, ImageBudget] = field(default_factory=dict)
    """Of what is encoded between two decode steps, by pool; without one, the encoder's own limits."""
    scales: bool = False
    """Whether the pool manager starts and stops instances."""
    control_s: float = 0.0003
    """Time of a message between two processes, in each direction."""
    host: Host | None = None
    """The host that all processes share; without one, devices and preparing cores are the instances' own."""
    hosts: Hosts | None = None
    """On which instances are placed in their order; None: each is on its own."""
    encoders_share: Sharing | None = None
    """Whose devices encoders compute on, if they have none of their own."""
    bytes_per_pixel: float = BYTES_PER_PIXEL
    """Of undecoded images and frames, for their preparation."""
    faults: Sequence[Fault] = field(default=())
    replanner: Replanner | None = None
    """Of searches for better placements, for a pool manager that follows a plan."""

    @property
    def instances(self) -> Mapping[str, Kind]:
        """Pools of the instances at the start, by their names, in the order of ``sizes``."""
        return {f"{pool.name}-{number}": pool for pool, count in self.sizes.items() for number in range(1, count + 1)}

    def topology(self) -> Topology:
        """Where the instances are of which there are so many from the beginning to the end."""
        topology = Topology(self.hosts)
        for name, pool in self.instances.items():
            kind = self.kinds[pool]
            topology.enter(name, kind.devices, kind.link, kind.within_host, name)
        return topology

    def neighbour(self, instance: str, role: Role) -> str:
        """The instance whose devices this one computes on; itself if it has its own."""
        if role is not Role.E or self.encoders_share is None:
            return instance
        other = Kind(self.encoders_share.role)
        number = int(instance.rpartition("-")[2])
        return f"{other.name}-{(number - 1) % self.sizes[other] + 1}"

    @property
    def is_managed(self) -> bool:
        """Whether anything is up to a pool manager: sizes, or roles."""
        return self.scales or any(settings.switchable is not None for settings in self.texts.values())
