"""Settings that services have in common by what they are: a gRPC service, a member of pool managers, an instance."""

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from triptych.domain.limits import MAX_MESSAGE_NBYTES
from triptych.domain.lora import LoraLimits, is_lora_name
from triptych.domain.tier import Tier
from triptych.engine.compute import ComputeOptions
from triptych.policy.addresses import why_not_called
from triptych.runtime.host import own_address
from triptych.runtime.manager_access import ManagerAccess
from triptych.runtime.settings import ServiceSettings, Strings
from triptych.runtime.watched_value import ReportIntervals
from triptych.transport.options import TransferOptions


def _own(value: object) -> object:
    if value != "auto":
        return value
    try:
        return own_address()
    except OSError as error:
        raise ValueError(f"auto: this machine's name has no address ({error.strerror})") from None


class RpcServiceSettings(ServiceSettings):
    """Settings of every gRPC service."""

    host: Annotated[str, BeforeValidator(_own)] = "127.0.0.1"
    """IP address to listen on; auto is the one that this machine's name stands for, as in a container."""
    port: int = Field(ge=0, le=65535)
    """TCP port for calls; each service has its own default; 0 picks a free one and logs it."""
    allow_network: bool = False
    """Allow a non-loopback address without TLS; calls are then neither encrypted nor authenticated."""
    max_message_bytes: int = Field(default=MAX_MESSAGE_NBYTES, ge=1 << 20, le=MAX_MESSAGE_NBYTES)
    """Largest message of a call. Its fields have tighter bounds of their own. Callers send no larger ones."""
    max_concurrent_calls: int = Field(default=4096, ge=1)
    """Most calls at the same time, load streams included; one more is refused before it is read. Calls that share a
    stream count apart from those that do not."""

    @model_validator(mode="after")
    def _network_is_meant(self) -> Self:
        address = ip_address(self.host)
        if not address.is_loopback and not self.allow_network and self.tls.files is None:
            raise ValueError(f"host {self.host} is not a loopback address: configure TLS, or set --allow-network")
        return self

    @property
    def reaches_network(self) -> bool:
        """Whether it may be connected with other machines."""
        return self.allow_network or self.tls.files is not None


class MemberSettings(RpcServiceSettings):
    """Settings of every service that registers with pool managers."""

    managers: ManagerAccess = ManagerAccess()
    """The pool managers to register with."""
    advertise: str = ""
    """HOST:PORT at which others reach this process, for pool managers; empty means ``host`` and ``port``."""

    @model_validator(mode="after")
    def _others_can_reach_it(self) -> Self:
        if self.advertise and (reason := why_not_called(self.advertise, beyond_loopback=True)) is not None:
            raise ValueError(f"advertise {self.advertise!r}: {reason}")
        if self.managers.pool_manager and not self.advertise and ip_address(self.host).is_unspecified:
            raise ValueError(f"host {self.host} is no address that others can call: set advertise for pool_manager")
        return self

    def advertised(self, port: int) -> str:
        """The address for others; ``port`` is the one that it listens on."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.advertise or f"{host}:{port}"


class InstanceSettings(MemberSettings):
    """Settings of every instance: a process that runs part of the model and keeps embeddings in registered memory."""

    max_message_bytes: int = Field(default=64 << 20, ge=1 << 20, le=MAX_MESSAGE_NBYTES)
    """Largest message of a call: one item or one prompt. It is received in full before it is checked."""
    instance_id: str = Field(default="", max_length=128)
    """Name of this instance, unique in the cluster; empty means machine name and port."""

    model: Path
    """Directory of the model (configuration, weights, tokenizer, processor), OWNER/NAME[@REVISION] of a repository on a hub,
    or demo for the bundled model."""
    model_id: str = ""
    """Name under which the model is served; empty means that of the directory as given, or of the repository it was cached from."""
    compute: ComputeOptions = ComputeOptions()
    """Device and data type of the engine."""
    delay_profile: Path | None = None
    """Profile, or directory with one per part, for demonstrations of scaling. The engine then computes nothing, but
    takes as long as the profile predicts; answers have no meaning.
    """

    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    """Devices over which the engine divides the model: of engine vllm, and of engines that sleep as a profile with this degree predicts."""
    tier: str = ""
    """Tier of hardware, as NAME[:device=TEXT,price=USD_PER_HOUR,speed=FACTOR]: pools of one role on several kinds of devices are scaled
    apart, the cheapest first. Empty: none."""

    lora: Strings = ()
    """NAME=DIR of LoRA adapters to load at start, as peft saves them: each is served as a model of this name. Text
    instances and encoders take their parts of it. May be repeated."""
    lora_root: Path | None = None
    """Directory whose subdirectories can be loaded as LoRA adapters while the instance serves (triptych lora load). Empty: none can."""
    lora_limits: LoraLimits = LoraLimits()
    """Limits of LoRA adapters."""

    transfers: TransferOptions = TransferOptions()
    """Options of the transfer of embeddings."""
    sweep_interval_s: float = Field(default=0.5, gt=0, le=60)
    """Interval at which expired leases and quarantined memory are checked for memory that can be reused, seconds."""

    load_reports: ReportIntervals = ReportIntervals()
    """Intervals of load reports."""

    @field_validator("tier")
    @classmethod
    def _it_is_a_tier(cls, text: str) -> str:
        if text:
            Tier.parse(text)
        return text

    @field_validator("lora")
    @classmethod
    def _adapters_have_names_and_directories(cls, lora: tuple[str, ...]) -> tuple[str, ...]:
        names = [entry.partition("=")[0] for entry in lora]
        for entry, name in zip(lora, names, strict=True):
            if not is_lora_name(name) or not entry.partition("=")[2]:
                raise ValueError(f"{entry!r} is not NAME=DIR, with a name of A-Z a-z 0-9 . _ : / -")
        if len(set(names)) < len(names):
            raise ValueError("two adapters have the same name")
        return lora

    @property
    def hardware_tier(self) -> Tier | None:
        return Tier.parse(self.tier) if self.tier else None

    def check_engine(self, engine: str, vllm_args: str) -> None:
        """Raises ValueError for settings that another engine than ``engine`` has."""
        if self.lora or self.lora_root is not None:
            if engine == "vllm":
                raise ValueError(
                    "engine vllm serves no LoRA adapters yet: its requests name none, and its prefixes are not told apart by them: "
                    "leave out lora and lora_root"
                )
            if self.delay_profile is not None:
                raise ValueError("LoRA adapters need an engine that computes, without delay_profile")
        if self.tensor_parallel > 1 and self.delay_profile is None and engine != "vllm":
            raise ValueError(f"tensor_parallel is {self.tensor_parallel}, but engine {engine} runs on one device")
        if engine != "vllm":
            if vllm_args:
                raise ValueError(f"vllm_args is for engine vllm, the engine is {engine}")
            return
        if self.delay_profile is not None:
            raise ValueError("engine vllm computes, it cannot have a delay_profile")
        if self.compute.device != ComputeOptions().device:
            raise ValueError("engine vllm chooses its devices itself, by CUDA_VISIBLE_DEVICES: device cannot be set")
