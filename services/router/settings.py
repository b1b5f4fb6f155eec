"""Settings of the router."""

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from triptych.media.sniff import MediaLimits
from triptych.policy.policies import Policies
from triptych.runtime.settings import RpcServiceSettings, Strings, service_config

from .membership import checked_address


class RouterSettings(RpcServiceSettings):
    model_config = service_config("router")

    port: int = Field(default=50051, ge=0, le=65535)
    """TCP port to listen on; 0 picks a free one and logs it."""
    model: Path = Path()
    """Directory of the model, or OWNER/NAME[@REVISION] of a repository on a hub. Only its configuration, tokenizer and chat
    template are read."""
    instances: Strings = ()
    """HOST:PORT of every instance. Each instance reports its own role (encoder, text or both)."""
    instances_file: Path | None = None
    """TOML file that lists the instances instead. It is polled: instances join and leave as it changes."""
    instances_poll_s: float = Field(default=1.0, ge=0.05, le=60)
    """How often that file is polled."""

    encoder_routing: str = "least-loaded"
    """Policy that chooses an encoder for each item: least-loaded, least-requests, power-of-two or round-robin. An encoder that
    already has the item's embedding is preferred unless its load is much higher."""
    text_routing: str = "least-loaded"
    """Policy that chooses a text instance for each request: least-loaded, least-requests, power-of-two or round-robin."""
    sharding: str = "earliest-end"
    """Which items are split over several encoders: earliest-end (if the last shard then ends clearly sooner), or never."""
    ordering: str = "deadline"
    """Order of the requests of one priority that wait for encoders: deadline (the least time left first, except that none is
    overtaken by one that came 30 s later), or first-come."""
    admission: str = "bounded"
    """When to refuse a request as overload: bounded (by the number of requests and the bytes of their media)."""

    max_items_per_request: int = Field(default=64, ge=0)
    """Most images, videos and audio clips in one request."""
    media: MediaLimits = MediaLimits()
    """Limits of one item."""
    max_stop_strings: int = Field(default=16, ge=0)
    """Most stop strings in one request."""
    max_stop_chars: int = Field(default=256, ge=1)
    """Longest stop string."""
    max_top_k: int = Field(default=1_000_000, ge=0)
    """Largest top_k."""
    max_stop_token_ids: int = Field(default=64, ge=0)
    """Most stop token ids in one request; 4096 at most, whatever is set."""
    max_logit_bias: int = Field(default=1024, ge=0)
    """Most tokens whose logits one request may shift; 4096 at most, whatever is set."""
    max_schema_chars: int = Field(default=32_768, ge=1)
    """Longest JSON schema."""
    max_request_id_chars: int = Field(default=256, ge=1)
    """Longest request id."""

    max_concurrent_requests: int = Field(default=2048, ge=1)
    """Most requests at the same time; one more is refused as overload."""
    max_media_bytes: int = Field(default=2 << 30, ge=1)
    """Most bytes of media over all requests; they are kept for retries."""
    max_waiting_requests: int = Field(default=1024, ge=0)
    """Most requests that wait for room in the encoders' arenas."""
    retry_after_s: float = Field(default=1.0, gt=0)
    """Retry-After of a refused request."""
    prepare_threads: int = Field(default=2, ge=1, le=64)
    """Threads that hash images, render templates and tokenize."""
    prepare_inline_chars: int = Field(default=2048, ge=0)
    """Requests with at most this much text are prepared on the event loop, which is faster than a thread ..."""
    prepare_inline_media_bytes: int = Field(default=64 << 10, ge=0)
    """... if they also have at most this many bytes of media."""

    max_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Largest timeout of a request; a longer one is reduced to this."""
    control_timeout_s: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Timeout of control calls: describing an instance, releasing leases."""
    max_lease_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Longest lease to request from an encoder. When a lease expires, it is renewed or the item encoded again."""
    min_lease_s: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """A lease with less time left than this is renewed before its ticket is sent to a text instance."""

    min_shard_tokens: int = Field(default=512, ge=0)
    """Smallest shard, in tokens, when an item is split over several encoders; 0 never splits."""
    max_shards: int = Field(default=8, ge=1, le=64)
    """Most shards of one item."""
    max_encode_attempts: int = Field(default=3, ge=1)
    """Attempts to encode an item before the request fails."""
    max_text_attempts: int = Field(default=3, ge=1)
    """Attempts to send a request to a text instance, before the first token."""
    arena_retry_s: float = Field(default=0.1, gt=0)
    """How long an encoder whose arena is full gets no items, and the first pause before an item it refused is retried."""
    longest_pause_s: float = Field(default=2.0, gt=0)
    """Longest pause between retries of an item that no encoder has room for; pauses double up to this."""
    first_backoff_s: float = Field(default=1.0, gt=0)
    """First backoff of an instance whose engine failed; it doubles with each failure. Other instances are preferred."""
    longest_backoff_s: float = Field(default=30.0, gt=0)
    """Longest backoff."""
    pool_grace_s: float = Field(default=1.0, ge=0)
    """How long requests wait for a pool without any instance before they fail."""

    reconnect_min_s: float = Field(default=0.05, gt=0)
    """First pause before reconnecting to a lost instance; it doubles with each attempt."""
    reconnect_max_s: float = Field(default=1.0, gt=0)
    """Longest pause before reconnecting."""
    heartbeat_timeout_s: float = Field(default=5.0, gt=0)
    """An instance that sends no load report for this long is lost, with its calls. It sends at least one per second."""
    max_embedding_hints: int = Field(default=65_536, ge=0)
    """Most items whose encoder the router remembers, to reuse cached embeddings."""
    history_requests: int = Field(default=4096, ge=0)
    """Finished requests whose timelines are kept."""

    @field_validator("instances")
    @classmethod
    def _addresses_are_hosts_and_ports(cls, instances: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(checked_address, instances))

    @property
    def policies(self) -> Policies:
        return Policies.named(
            encoder_routing=self.encoder_routing,
            text_routing=self.text_routing,
            sharding=self.sharding,
            ordering=self.ordering,
            admission=self.admission,
        )

    @model_validator(mode="after")
    def _policies_are_known(self) -> Self:
        _ = self.policies
        return self

    @model_validator(mode="after")
    def _limits_fit_together(self) -> Self:
        for low, high in (
            ("min_lease_s", "max_lease_s"),
            ("reconnect_min_s", "reconnect_max_s"),
            ("arena_retry_s", "longest_pause_s"),
            ("first_backoff_s", "longest_backoff_s"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} ({getattr(self, low)}) exceeds {high} ({getattr(self, high)})")
        if self.instances and self.instances_file is not None:
            raise ValueError("instances and instances_file both name the instances: one of them is enough")
        if twice := sorted({one for one in self.instances if self.instances.count(one) > 1}):
            raise ValueError(f"instances names {', '.join(twice)} twice")
        return self
