"""Settings of a text instance."""

from dataclasses import fields, replace
from typing import Self

from pydantic import Field, field_validator, model_validator

from triptych.domain.stage import Role, Stage
from triptych.engine.decoder.options import EngineOptions
from triptych.machine.text.pull_turns import PullLimits
from triptych.machine.text.tensor_cache import CacheLimits
from triptych.runtime.settings import InstanceSettings, service_config

MIB = 1 << 20


class TextSettings(InstanceSettings):
    model_config = service_config("text")

    port: int = Field(default=50071, ge=0, le=65535)
    """TCP port for calls; 0 picks a free one and logs it."""
    role: Role = Role.PD
    """Stages of this instance: PD (prefill and decode) or EPD (also encode, in the same thread and on the same port)."""
    mount_encoder: str = ""
    """Role EPD: command line with the encoder's own settings (--arena-bytes, --max-batch-items, ...). It shares model, device,
    addresses, transports and process settings with the instance."""
    encode_patience_s: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    """Role EPD: prompts run before items. An item that has waited this long runs before prompts, in at most every second
    step."""

    engine: EngineOptions = EngineOptions()
    """Memory and steps of the engine."""

    @property
    def engine_options(self) -> EngineOptions:
        """Without an objective for steps where no answer is decoded (roles P and EP): nothing waits between two tokens."""
        return self.engine if self.role.serves(Stage.DECODE) else replace(self.engine, tpot_slo_s=None)

    max_concurrent_requests: int = Field(default=4096, ge=1)
    """Most requests at the same time, including finished ones whose answer is still being read."""

    tensor_cache: CacheLimits = CacheLimits()
    """Requests that wait for their embeddings, and what is held for those that run."""
    pulls: PullLimits = PullLimits()
    """Pulls of embeddings."""
    prefer_transport: str = Field(default="", pattern="^(shm|nixl|tcp)?$")
    """One of ``transports`` to try first; empty ranks them by host and hardware."""
    image_cache_bytes: int = Field(default=256 * MIB, ge=MIB)
    """Registered memory for pulled embeddings: those in use, and a cache in the rest."""
    connect_timeout_s: float = Field(default=5.0, gt=0, le=60)
    """Timeout of connecting to one encoder's memory."""
    release_timeout_s: float = Field(default=2.0, gt=0, le=60)
    """Timeout of releasing leases at one encoder; leases that could not be released expire."""
    check_threads: int = Field(default=2, ge=1, le=64)
    """Threads that verify pulled embeddings."""

    stream_interval_s: float = Field(default=0.0, ge=0, le=1)
    """Shortest time between two messages of an answer; tokens are collected meanwhile. 0 sends each token at once. Fewer
    messages cost less on every hop, but tokens arrive up to this much later."""

    @field_validator("role")
    @classmethod
    def _role_is_one_of_two(cls, role: Role) -> Role:
        if role not in (Role.PD, Role.EPD):
            raise ValueError(
                f"{role.value} is neither PD nor EPD: prefill and decode run in one instance; for E run an encoder"
            )
        return role

    @model_validator(mode="after")
    def _an_encoder_is_mounted_where_it_encodes(self) -> Self:
        if self.mount_encoder and not self.role.serves(Stage.ENCODE):
            raise ValueError(f"mount_encoder is for role EPD, the role is {self.role.value}")
        return self

    @model_validator(mode="after")
    def _each_engine_has_its_own_options(self) -> Self:
        self.check_engine(self.engine.engine, self.engine.vllm_args)
        if self.engine.engine != "vllm":
            return self
        if self.role is not Role.PD:
            raise ValueError(f"engine vllm serves role PD, not {self.role.value}: encoders encode for it")
        for option in fields(EngineOptions):
            if option.name not in ("engine", "vllm_args") and getattr(self.engine, option.name) != option.default:
                raise ValueError(f"engine vllm does not have {option.name}: set vLLM's own arguments in vllm_args")
        return self
