"""What an encoder can be told."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from triptych.runtime.settings import RpcServiceSettings, Strings, service_config

MIB = 1 << 20


class EncoderSettings(RpcServiceSettings):
    model_config = service_config("encoder")

    port: int = Field(default=50061, ge=0, le=65535)
    """TCP port for calls; 0 takes a free one and logs it."""
    advertise_host: str = ""
    """Address under which peers reach this instance's memory over TCP; empty takes ``host``, which it then has to be."""
    instance_id: str = Field(default="", max_length=128)
    """Name of this instance, unique in the cluster; empty makes one of the machine's name and the port."""
    model: Path
    """Directory of the model (configuration, weights, processor), or OWNER/NAME[@REVISION] of a repository on a hub."""
    model_id: str = ""
    """Name under which the model is served; empty takes the directory's."""
    device: str = "cpu"
    """Where the tower runs, as torch names it."""
    dtype: str = Field(default="float32", pattern="^(float32|float16|bfloat16)$")
    """What the tower computes in: float32, float16 or bfloat16. The text pool must use the same."""
    torch_threads: int = Field(default=1, ge=1, le=256)
    """Threads that one pass of the tower uses."""

    transports: Strings = ("shm", "nixl", "tcp")
    """Ways in which embeddings may be pulled; those that are not installed here are left out. Readers try what works."""
    arena: str = Field(default="host", pattern="^(host|device)$")
    """Where embeddings lie: in the host's memory, or in that of ``device``, which then needs nixl or tcp to be reached."""
    arena_bytes: int = Field(default=256 * MIB, ge=MIB)
    """Registered memory for embeddings: those that are leased and, in what is left, the cache."""
    max_pull_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Longest time that a read may take: a slot whose lease has ended is kept for so much longer."""
    max_lease_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Longest lease; a longer one that is asked for is cut to this."""
    max_leases: int = Field(default=65_536, ge=2)
    """Most leases at the same time."""
    sweep_interval_s: float = Field(default=0.5, gt=0, le=60)
    """How often leases that were never given back are looked for."""

    max_item_bytes: int = Field(default=32 * MIB, ge=1)
    """Largest item."""
    max_received_bytes: int = Field(default=512 * MIB, ge=1)
    """Most media bytes of calls in progress; a call that does not fit is refused."""
    max_waiting_items: int = Field(default=256, ge=1)
    """Most items that are prepared, wait, or are encoded at the same time; one more is refused."""
    max_prepared_bytes: int = Field(default=1024 * MIB, ge=1)
    """Most memory of these items together, decoded and preprocessed."""
    prepare_threads: int = Field(default=0, ge=0, le=1024)
    """Threads that decode and preprocess; 0 for one per core. Each keeps to the cores of one NUMA node."""
    max_batch_items: int = Field(default=8, ge=1)
    """Most items in one pass of the tower."""
    max_batch_tokens: int = Field(default=8192, ge=1)
    """Most embedding tokens in one pass of the tower; a larger item runs alone."""
    max_batch_bytes: int = Field(default=256 * MIB, ge=1)
    """Most bytes of preprocessed items (pixels, features) in one pass of the tower; a larger item runs alone."""

    load_min_interval_s: float = Field(default=0.02, ge=0.001, le=10)
    """Load reports to one watcher are at least this far apart."""
    load_max_interval_s: float = Field(default=1.0, gt=0, le=60)
    """A watcher hears of the load at least this often."""

    @model_validator(mode="after")
    def _limits_fit_together(self) -> Self:
        if self.max_item_bytes > self.max_received_bytes:
            raise ValueError(
                f"max_item_bytes ({self.max_item_bytes}) exceeds max_received_bytes ({self.max_received_bytes}): "
                "such an item could never be taken"
            )
        return self
