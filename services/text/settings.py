"""What a text instance can be told."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from triptych.runtime.settings import RpcServiceSettings, Strings, service_config

MIB = 1 << 20


class TextSettings(RpcServiceSettings):
    model_config = service_config("text")

    port: int = Field(default=50071, ge=0, le=65535)
    """TCP port for calls; 0 takes a free one and logs it."""
    advertise_host: str = ""
    """Address under which peers reach this instance's memory over TCP; empty takes ``host``, which it then has to be."""
    instance_id: str = Field(default="", max_length=128)
    """Name of this instance, unique in the cluster; empty makes one of the machine's name and the port."""
    encoders: Strings = ("127.0.0.1:50061",)
    """HOST:PORT of every encoder whose embeddings this instance may be asked to pull."""

    model: Path
    """Directory of the model (configuration, weights, tokenizer), or OWNER/NAME[@REVISION] of a repository on a hub."""
    model_id: str = ""
    """Name under which the model is served; empty takes the directory's."""
    device: str = "cpu"
    """Where the language model runs, as torch names it."""
    dtype: str = Field(default="float32", pattern="^(float32|float16|bfloat16)$")
    """What the language model computes in: float32, float16 or bfloat16. The encoder pool must use the same."""
    torch_threads: int = Field(default=1, ge=1, le=256)
    """Threads that one step of the engine uses."""
    kv_cache_bytes: int = Field(default=256 * MIB, ge=MIB)
    """Memory for the keys and values of running sequences, and of beginnings of prompts in what is left."""
    max_sequences: int = Field(default=32, ge=1)
    """Most sequences in one step of the engine."""
    token_budget: int = Field(default=2048, ge=1)
    """Most tokens that one step of the engine computes."""
    tpot_slo_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Longest time that one step is to take, and with it the time between two tokens of an answer. Steps are measured at
    start, and the token budget is the largest up to ``token_budget`` that keeps to it; unset measures nothing."""
    max_embedding_bytes: int = Field(default=1024 * MIB, ge=MIB)
    """Most bytes of embeddings that the engine holds for requests that run; further ones wait, a larger one is refused."""
    cross_cache_bytes: int = Field(default=1024 * MIB, ge=0)
    """Memory for the keys and values of images where text attends to them in layers of its own (Llama 3.2 Vision);
    those that do not fit are computed again in every step."""
    packed_weight_bytes: int = Field(default=2048 * MIB, ge=0)
    """Memory for weights that are kept a second time on a CPU, in an order in which small batches are computed up to
    twice as fast; the largest layers come first, in float32 only. 0 keeps none."""

    max_concurrent_requests: int = Field(default=4096, ge=1)
    """Most requests at the same time, answered ones that are still being read included."""
    max_waiting_requests: int = Field(default=1024, ge=1)
    """Most requests that wait for their embeddings or for the engine; one more is refused."""
    max_running_requests: int = Field(default=64, ge=1)
    """Most requests in the engine: those beyond ``max_sequences`` are ready to join its next step."""

    transports: Strings = ("shm", "nixl", "tcp")
    """Ways in which embeddings may be pulled; those that are not installed here are left out."""
    prefer_transport: str = Field(default="", pattern="^(shm|nixl|tcp)?$")
    """One of ``transports`` to try before the others, whatever was measured; empty ranks them by host and hardware."""
    arena: str = Field(default="host", pattern="^(host|device)$")
    """Where embeddings lie: in the host's memory, or in that of ``device``, which then needs nixl or tcp to be reached."""
    image_cache_bytes: int = Field(default=256 * MIB, ge=MIB)
    """Registered memory for pulled embeddings: those that requests need and, in what is left, the cache."""
    max_pulling_bytes: int = Field(default=64 * MIB, ge=1)
    """Most bytes of embeddings being pulled at the same time, half of them from one encoder; a larger one goes alone."""
    max_pulls_per_encoder: int = Field(default=8, ge=1, le=1024)
    """Most pulls from one encoder at the same time."""
    max_pull_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Longest time for finding an embedding's holder, connecting, pulling and checking. At most the encoders' own."""
    failure_grace_s: float = Field(default=0.5, ge=0, le=60)
    """When one item of a request could not be pulled: how long to see whether others fail too, to name them all."""
    connect_timeout_s: float = Field(default=5.0, gt=0, le=60)
    """Longest time for connecting to one encoder's memory."""
    describe_timeout_s: float = Field(default=2.0, gt=0, le=60)
    """Longest time for an encoder to say who it is."""
    meet_interval_s: float = Field(default=1.0, ge=0.1, le=60)
    """How often each encoder is asked who it is, so that one that restarted is connected to before it is needed."""
    release_timeout_s: float = Field(default=2.0, gt=0, le=60)
    """Longest time for giving leases back to one encoder; those that could not be given back end by themselves."""
    sweep_interval_s: float = Field(default=0.5, gt=0, le=60)
    """How often memory is looked for that a late write could still have reached."""
    check_threads: int = Field(default=2, ge=1, le=64)
    """Threads that check what was pulled."""

    stream_interval_s: float = Field(default=0.0, ge=0, le=1)
    """An answer's messages are at least this far apart, from the first on, and carry what was ready meanwhile; 0 sends
    each token when it is there. Fewer messages cost less on every hop; the time between tokens grows to at most this."""

    load_min_interval_s: float = Field(default=0.02, ge=0.001, le=10)
    """Load reports to one watcher are at least this far apart."""
    load_max_interval_s: float = Field(default=1.0, gt=0, le=60)
    """A watcher hears of the load at least this often."""

    @model_validator(mode="after")
    def _limits_fit_together(self) -> Self:
        if self.max_sequences > self.token_budget:
            raise ValueError(f"max_sequences ({self.max_sequences}) exceeds token_budget ({self.token_budget})")
        return self
