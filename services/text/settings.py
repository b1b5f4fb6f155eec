"""Settings of a text instance."""

from dataclasses import fields, replace
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from triptych.domain.stage import Role, Stage
from triptych.engine.decoder.options import EngineOptions
from triptych.machine.arena.leases import LeaseLimits
from triptych.machine.text.pull_queue import PullLimits
from triptych.machine.text.tensor_cache import CacheLimits
from triptych.policy.transport import between_processes
from triptych.rpc.settings import InstanceSettings
from triptych.runtime.settings import service_config
from triptych.transport.arena import HEADER_NBYTES

MIB = 1 << 20


class TextSettings(InstanceSettings):
    model_config = service_config("text")

    port: int = Field(default=50071, ge=0, le=65535)
    """TCP port for calls; 0 picks a free one and logs it."""
    role: Role = Role.PD
    """Stages of this instance: prefill (P), decode (D) or both (PD), each also with encode (EP, ED, EPD), in the same thread and on
    the same port. P and EP hand each answer over after its first token; D and ED go on with what others transfer. E needs switchable."""
    switchable: Role | None = None
    """The widest role that the instance can switch to while it serves, which includes its own: it loads what all these stages need at
    start. Empty: it never switches. Orders come from the pool managers."""
    resident: Literal["all", "role", "auto"] = "all"
    """Of an instance that can switch between encode and other stages: which weights are in memory. all: of the whole model. role: those that
    the open stages need; the others are loaded while it goes on serving, before a switch opens a stage that needs them, and leave the memory
    when the last one closes. auto: all if the weights and what else is taken fit into the free memory at start, else role."""
    mount_encoder: str = ""
    """Roles with E: command line with the encoder's own settings (--arena-bytes, --max-batch-items, ...). It shares model, device,
    addresses, transports and process settings with the instance."""
    encode_patience_s: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    """Roles with E: prompts run before items. An item that has waited this long runs before prompts, in at most every second
    step. With encode_first, prompts run in one step after they have waited this long."""
    encode_share: float = Field(default=0.5, gt=0, le=1)
    """Roles ED and EPD without tpot_slo_s: the most that items take of the time in which prompts or answers can be computed. Each batch of the
    encoder is followed by steps for as long as this asks; 1 does not bound it."""
    encode_first: bool = False
    """Roles with E: items run before prompts, beside decodes. For encoders that lend their idle time to text requests: with the router's
    policy lending=idle. With tpot_slo_s, an answer whose tokens then are four times that apart goes on elsewhere."""

    engine: EngineOptions = EngineOptions()
    """Memory and steps of the engine."""

    @property
    def engine_options(self) -> EngineOptions:
        """Without an objective for steps where no answer is decoded (roles P and EP): nothing waits between two tokens."""
        return self.engine if self.widest.serves(Stage.DECODE) else replace(self.engine, tpot_slo_s=None)

    @property
    def widest(self) -> Role:
        """The role with all stages that it may ever serve."""
        return self.switchable or self.role

    max_concurrent_requests: int = Field(default=4096, ge=1)
    """Most requests at the same time, including finished ones whose answer is still being read."""

    tensor_cache: CacheLimits = CacheLimits()
    """Requests that wait for their embeddings, and what is held for those that run."""
    pulls: PullLimits = PullLimits()
    """Pulls of embeddings."""
    prefer_transport: str = Field(default="", pattern=f"^({'|'.join(between_processes())})?$")
    """Transport among ``transports`` to try first; empty ranks them by host and hardware."""
    image_cache_bytes: int = Field(default=256 * MIB, gt=HEADER_NBYTES)
    """Registered memory for pulled embeddings: those in use, and a cache in the rest."""
    kv_arena_bytes: int = Field(default=64 * MIB, ge=0)
    """Registered memory for keys and values that this instance transfers: those that others pull, and a cache in the rest. An
    instance that encodes as well has them beside its embeddings instead, in the encoder's arena_bytes. 0 for none: then what is handed
    over is computed again."""
    kv_prefixes: bool = False
    """Keep keys and values of prompts and answers in that arena as well, and tell routers which: other instances then pull the beginnings
    of their prompts instead of computing them, if the router's policy prefixes says so."""
    leases: LeaseLimits = LeaseLimits()
    """Limits of leases on them, if no encoder is mounted."""
    kv_bytes_per_step: int = Field(default=64 * MIB, ge=1)
    """Most bytes of keys and values that are copied between two steps of an engine that decodes; a segment has up to 8 MiB, or 64
    tokens, or is a whole state. Others copy what there is."""
    transfer_kv_on_drain: bool = False
    """When the instance drains, its answers go on elsewhere, with their keys and values, and what it has not begun is refused; else,
    and where the arena has no room, they end here. For pools in which another instance goes on: alone, it would lose them."""
    kv_transfer_wait_s: float = Field(default=10.0, ge=0, le=600)
    """How long a drain waits after the last request for others to pull what was transferred to them. They compute the rest."""
    connect_timeout_s: float = Field(default=5.0, gt=0, le=60)
    """Timeout of connecting to one encoder's memory."""
    release_timeout_s: float = Field(default=2.0, gt=0, le=60)
    """Timeout of releasing leases at one encoder; leases that could not be released expire."""
    check_threads: int = Field(default=2, ge=1, le=64)
    """Threads that verify pulled embeddings."""

    stream_interval_s: float = Field(default=0.0, ge=0, le=1)
    """Shortest time between two messages of an answer; tokens are collected meanwhile. 0 sends each token at once. Fewer
    messages cost less on every hop, but tokens arrive up to this much later."""

    @field_validator("kv_arena_bytes")
    @classmethod
    def _the_arena_has_room(cls, nbytes: int) -> int:
        if 0 < nbytes <= HEADER_NBYTES:
            raise ValueError(f"an arena has more than {HEADER_NBYTES} bytes, or 0 for none")
        return nbytes

    @model_validator(mode="after")
    def _it_has_a_stage_of_text(self) -> Self:
        if self.widest is Role.E:
            raise ValueError("role E is that of an encoder: run triptych.services.encoder")
        return self

    @model_validator(mode="after")
    def _an_encoder_is_mounted_where_it_encodes(self) -> Self:
        if self.mount_encoder and not self.widest.serves(Stage.ENCODE):
            raise ValueError(f"mount_encoder is for roles EP, ED and EPD, the role is {self.widest.value}")
        return self

    @model_validator(mode="after")
    def _it_can_switch_back(self) -> Self:
        if not self.widest.serves(*self.role.stages):
            raise ValueError(f"switchable is {self.widest.value}, must include the role {self.role.value}")
        return self

    @model_validator(mode="after")
    def _it_has_parts_to_unload(self) -> Self:
        if self.resident == "role":
            if self.engine.engine == "vllm":
                raise ValueError("engine vllm cannot load and unload weights: leave out resident")
            if self.switchable is None or not self.switchable.serves(Stage.ENCODE):
                raise ValueError(
                    "resident=role is for instances that switch between encode and other stages: set switchable"
                )
            if self.delay_profile is not None:
                raise ValueError("resident=role needs engines that compute, without delay_profile")
        return self

    @model_validator(mode="after")
    def _each_engine_has_its_own_options(self) -> Self:
        self.check_engine(self.engine.engine, self.engine.vllm_args)
        if self.engine.engine != "vllm":
            return self
        if self.switchable is not None:
            raise ValueError("engine vllm cannot switch: leave out switchable")
        if self.role.serves(Stage.ENCODE):
            raise ValueError(f"engine vllm serves roles P, D and PD, not {self.role.value}: encoders encode for it")
        for option in fields(EngineOptions):
            if option.name not in ("engine", "vllm_args") and getattr(self.engine, option.name) != option.default:
                raise ValueError(f"engine vllm does not have {option.name}: set vLLM's own arguments in vllm_args")
        return self
