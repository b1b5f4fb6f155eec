"""What a text instance can be told."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from triptych.domain.stage import Role, Stage
from triptych.runtime.settings import InstanceSettings, service_config

MIB = 1 << 20


class TextSettings(InstanceSettings):
    model_config = service_config("text")

    port: int = Field(default=50071, ge=0, le=65535)
    """TCP port for calls; 0 takes a free one and logs it."""
    role: Role = Role.PD
    """Stages of this instance: PD (prefill and decode) or EPD, which encodes as well, in the same thread and on the same
    port."""
    mount_encoder: str = ""
    """Role EPD: command line of the encoder, of what it alone has (--arena-bytes, --max-batch-items, ...). Model, device,
    addresses, transports and what belongs to the process are the whole instance's."""
    encode_patience_s: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    """Role EPD: prompts go before items that are to be encoded. One that has waited so long goes before prompts, in every
    second step at most."""

    kv_cache_bytes: int = Field(default=256 * MIB, ge=MIB)
    """Memory for the keys and values of running sequences, and of cached prefixes in what is left."""
    max_sequences: int = Field(default=32, ge=1)
    """Most sequences in one step of the engine."""
    token_budget: int = Field(default=2048, ge=1)
    """Most tokens that one step of the engine computes."""
    tpot_slo_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Longest time that one step is to take, and with it the time between two tokens of an answer. Steps are measured at
    start, and the token budget is the largest up to ``token_budget`` that takes three quarters of it while nothing else
    runs. Role EPD: so is what is encoded beside one step of decodes. Unset measures nothing."""
    max_embedding_bytes: int = Field(default=1024 * MIB, ge=MIB)
    """Most bytes of embeddings that the engine holds for requests that run or wait for a place in a step; further requests
    wait before they pull, a larger one is refused."""
    cross_cache_bytes: int = Field(default=1024 * MIB, ge=0)
    """Memory for the keys and values of images where text attends to them in layers of its own (Llama 3.2 Vision);
    those that do not fit are computed again in every step."""
    packed_weight_bytes: int = Field(default=2048 * MIB, ge=0)
    """Memory for weights that are kept a second time on a CPU, in an order in which small batches are computed up to
    twice as fast; the largest layers come first, in float32 only. 0 keeps none."""
    enforce_eager: bool = False
    """On a GPU, capture no CUDA graphs for decoding: less memory and a quicker start, but slower tokens."""

    max_concurrent_requests: int = Field(default=4096, ge=1)
    """Most requests at the same time, answered ones that are still being read included."""
    max_waiting_requests: int = Field(default=1024, ge=1)
    """Most requests that wait for their embeddings or for the engine; one more is refused."""

    prefer_transport: str = Field(default="", pattern="^(shm|nixl|tcp)?$")
    """One of ``transports`` to try before the others, whatever was measured; empty ranks them by host and hardware."""
    image_cache_bytes: int = Field(default=256 * MIB, ge=MIB)
    """Registered memory for pulled embeddings: those that requests need and, in what is left, the cache."""
    max_pulling_bytes: int = Field(default=64 * MIB, ge=1)
    """Most bytes of embeddings being pulled at the same time, half of them from one encoder; a larger one goes alone."""
    max_pulls_per_encoder: int = Field(default=8, ge=1, le=1024)
    """Most pulls from one encoder at the same time."""
    failure_grace_s: float = Field(default=0.5, ge=0, le=60)
    """When one item of a request could not be pulled: how long to see whether others fail too, to name them all."""
    connect_timeout_s: float = Field(default=5.0, gt=0, le=60)
    """Longest time for connecting to one encoder's memory."""
    release_timeout_s: float = Field(default=2.0, gt=0, le=60)
    """Longest time for giving leases back to one encoder; those that could not be given back end by themselves."""
    check_threads: int = Field(default=2, ge=1, le=64)
    """Threads that check what was pulled."""

    stream_interval_s: float = Field(default=0.0, ge=0, le=1)
    """An answer's messages are at least this far apart, from the first on, and carry what was ready meanwhile; 0 sends
    each token when it is there. Fewer messages cost less on every hop; the time between tokens grows to at most this."""

    @field_validator("role")
    @classmethod
    def _role_is_one_of_two(cls, role: Role) -> Role:
        if role not in (Role.PD, Role.EPD):
            raise ValueError(
                f"{role.value} is not among PD and EPD: prefill and decode share an instance, E is an encoder"
            )
        return role

    @model_validator(mode="after")
    def _an_encoder_is_mounted_where_it_encodes(self) -> Self:
        if self.mount_encoder and not self.role.serves(Stage.ENCODE):
            raise ValueError(f"mount_encoder is for role EPD, the role is {self.role.value}")
        return self

    @model_validator(mode="after")
    def _limits_fit_together(self) -> Self:
        if self.max_sequences > self.token_budget:
            raise ValueError(f"max_sequences ({self.max_sequences}) exceeds token_budget ({self.token_budget})")
        return self
