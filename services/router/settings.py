"""What the router can be told."""

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
    """TCP port to listen on; 0 takes a free one and logs it."""
    model: Path = Path()
    """Directory of the model, or OWNER/NAME[@REVISION] of a repository on a hub. Its configuration, tokenizer and chat
    template are read, not its weights."""
    instances: Strings = ()
    """HOST:PORT of each instance, encoders and text instances alike: what it serves, it says itself."""
    instances_file: Path | None = None
    """A file (TOML) that names them instead, and is watched: they join and leave as it changes."""
    instances_poll_s: float = Field(default=1.0, ge=0.05, le=60)
    """How often that file is looked at."""

    encoder_routing: str = "least-loaded"
    """Which encoder gets an item: least-loaded, least-requests, power-of-two or round-robin. One that is believed to hold
    its embedding is preferred while it has not much more to do."""
    text_routing: str = "least-loaded"
    """Which text instance gets a request: least-loaded, least-requests, power-of-two or round-robin."""
    sharding: str = "earliest-end"
    """Which items are cut for several encoders: earliest-end, where the last shard is then done that much sooner, or never."""
    ordering: str = "deadline"
    """Who is next of the requests of one priority that wait for encoders: deadline, the least time left (nobody is overtaken
    by those that came 30 s later), or first-come."""
    admission: str = "bounded"
    """When a request is refused as overload: bounded, by the number of requests and the bytes of their media."""

    max_items_per_request: int = Field(default=64, ge=0)
    """Most images, videos and audio clips in one request."""
    media: MediaLimits = MediaLimits()
    """The most that one item may be."""
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
    """Most bytes of media held at the same time, over all requests; they are kept so that they can be sent again."""
    max_waiting_requests: int = Field(default=1024, ge=0)
    """Most requests that wait for room in the encoders' arenas."""
    retry_after_s: float = Field(default=1.0, gt=0)
    """What a refused caller is told to wait."""
    prepare_threads: int = Field(default=2, ge=1, le=64)
    """Threads that hash images, render templates and tokenize."""
    prepare_inline_chars: int = Field(default=2048, ge=0)
    """Requests with up to so much text are prepared on the event loop: that is faster than handing them over."""
    prepare_inline_media_bytes: int = Field(default=64 << 10, ge=0)
    """... and with up to so many bytes of images."""

    max_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """The most time a request gets, whatever it asks for."""
    control_timeout_s: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Time for the small calls: asking an instance who it is, giving leases back."""
    max_lease_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Longest lease asked of an encoder; one that runs out is renewed or the item encoded again."""
    min_lease_s: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """A lease with less left is renewed before its ticket is sent to a text instance."""

    min_shard_tokens: int = Field(default=512, ge=0)
    """An item is cut over several encoders where that pays, into shards of at least so many tokens; 0 cuts nothing."""
    max_shards: int = Field(default=8, ge=1, le=64)
    """Most shards of one item."""
    max_encode_attempts: int = Field(default=3, ge=1)
    """Times that an item is encoded before its loss fails the request."""
    max_text_attempts: int = Field(default=3, ge=1)
    """Times that a request is sent to a text instance before the first token."""
    arena_retry_s: float = Field(default=0.1, gt=0)
    """How long an encoder that refused for want of memory is left alone, and the first pause of what it refused."""
    longest_pause_s: float = Field(default=2.0, gt=0)
    """What an encoder has no room for is tried again after pauses that double up to this, until the deadline."""
    first_backoff_s: float = Field(default=1.0, gt=0)
    """How long an instance whose engine failed is avoided while there is another; it doubles with each failure."""
    longest_backoff_s: float = Field(default=30.0, gt=0)
    """Longest such time."""
    pool_grace_s: float = Field(default=1.0, ge=0)
    """How long a request that is under way waits for a pool which has no instance left."""

    reconnect_min_s: float = Field(default=0.05, gt=0)
    """First wait before an instance that went away is asked again; it doubles from there."""
    reconnect_max_s: float = Field(default=1.0, gt=0)
    """Longest such wait."""
    heartbeat_timeout_s: float = Field(default=5.0, gt=0)
    """An instance whose load reports, one a second at least, stop for so long is lost, with the calls it works on."""
    max_embedding_hints: int = Field(default=65_536, ge=0)
    """Images of which the router remembers the encoder that holds their embedding."""
    history_requests: int = Field(default=4096, ge=0)
    """Finished requests whose timeline can still be asked for."""

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
