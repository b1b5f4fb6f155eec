"""Settings of the router."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from triptych.domain.slo import MAX_OBJECTIVES, Slo
from triptych.machine.membership_view import ViewLimits
from triptych.machine.router.attainment import WindowLimits
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.machine.router.request import RequestLimits
from triptych.media.sniff import MediaLimits
from triptych.policy.admission import RequestBounds, ServerBounds
from triptych.policy.policies import PolicyNames
from triptych.policy.sharding import ShardLimits
from triptych.rpc.settings import MemberSettings
from triptych.runtime.settings import Strings, service_config

from .membership import checked_address


class RouterSettings(MemberSettings):
    model_config = service_config("router")

    port: int = Field(default=50051, ge=0, le=65535)
    """TCP port to listen on; 0 picks a free one and logs it."""
    model: Path = Path()
    """Directory of the model, OWNER/NAME[@REVISION] of a repository on a hub, or demo for the bundled model. Only its
    configuration, tokenizer and chat template are read."""
    model_id: str = Field(default="", max_length=512)
    """Name of the model at the pool managers; empty means that of the directory as given, or of the repository it was cached from."""
    instance_id: str = Field(default="", max_length=128)
    """Name of this router at the pool managers; empty means machine name and port."""
    instances: Strings = ()
    """HOST:PORT of every instance. Each instance reports its own role (encoder, text or both)."""
    instances_file: Path | None = None
    """TOML file that lists the instances instead. It is polled: instances join and leave as it changes."""
    instances_poll_s: float = Field(default=1.0, ge=0.05, le=60)
    """How often that file is polled."""
    lost_members: ViewLimits = ViewLimits()
    """With pool_manager instead: use of instances that it no longer lists."""

    policies: PolicyNames = PolicyNames()
    """The policies, by name."""

    reasoning: Literal["auto", "none", "gpt_oss", "gemma4", "mistral", "kimi_vl", "think"] = "auto"
    """Syntax of the model's reasoning; auto takes it from the chat template, none leaves reasoning in the text."""

    tool_syntax: Literal[
        "auto",
        "none",
        "minimax_m2",
        "kimi_k2",
        "deepseek_v3",
        "deepseek_v31",
        "mistral_args",
        "mistral",
        "functiongemma",
        "gemma4",
        "glm45",
        "qwen3_coder",
        "hermes",
        "pythonic",
        "llama3_json",
    ] = "auto"
    """Syntax of the model's tool calls; auto takes it from the chat template, none leaves calls in the text."""

    request_size: RequestBounds = RequestBounds()
    """Limits of one request."""
    media: MediaLimits = MediaLimits()
    """Limits of one item."""
    max_request_id_chars: int = Field(default=256, ge=1)
    """Longest request id."""

    capacity: ServerBounds = ServerBounds()
    """Limits over all requests."""
    cluster: ClusterLimits = ClusterLimits()
    """Limits of waiting requests and embedding hints, and timings of backoff."""
    attempts: RequestLimits = RequestLimits()
    """Retries and leases of one request."""
    shards: ShardLimits = ShardLimits()
    """Limits of splitting an item over several encoders."""
    slo: Strings = ("ttft=5x", "tbt=5x")
    """Objectives that attainment is measured by, and by whose ttft requests are ordered: [CLASS:]METRIC=VALUE with ttft, tbt or
    e2e, and s, ms, or x for a factor of the latency without other requests. CLASS is text, image, video or audio."""
    profiles: Path | None = None
    """Profiles of the model's parts, a directory or one file: objectives that are factors are then known from the first
    request on, instead of being estimated."""
    windows: WindowLimits = WindowLimits()
    """Windows in which load and attainment are measured."""
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
    reconnect_min_s: float = Field(default=0.05, gt=0)
    """First pause before reconnecting to a lost instance; it doubles with each attempt."""
    reconnect_max_s: float = Field(default=1.0, gt=0)
    """Longest pause before reconnecting."""
    heartbeat_timeout_s: float = Field(default=5.0, gt=0)
    """An instance that sends no load report for this long is lost, with its calls. It sends at least one per second."""
    resolved_keys: int = Field(default=65_536, ge=0)
    """Embeddings whose holders are remembered, so that they can be resolved by their keys."""
    resolved_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the encoders' arenas that open calls of Resolve may hold; chats always have the rest."""
    history_requests: int = Field(default=4096, ge=0)
    """Finished requests whose timelines are kept."""

    @field_validator("slo")
    @classmethod
    def _objectives_are_valid(cls, slo: tuple[str, ...]) -> tuple[str, ...]:
        if len(slo) > MAX_OBJECTIVES:
            raise ValueError(f"slo has {len(slo)} objectives, at most {MAX_OBJECTIVES} are allowed")
        Slo.parse(slo)
        return slo

    @field_validator("instances")
    @classmethod
    def _addresses_are_hosts_and_ports(cls, instances: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(checked_address, instances))

    @model_validator(mode="after")
    def _limits_fit_together(self) -> Self:
        if self.reconnect_min_s > self.reconnect_max_s:
            raise ValueError(
                f"reconnect_min_s ({self.reconnect_min_s}) exceeds reconnect_max_s ({self.reconnect_max_s})"
            )
        sources = {
            "instances": bool(self.instances),
            "instances_file": self.instances_file is not None,
            "pool_manager": bool(self.managers.pool_manager),
        }
        if len(given := [name for name, is_given in sources.items() if is_given]) > 1:
            raise ValueError(f"{' and '.join(given)} all name the instances: give only one")
        if twice := sorted({address for address in self.instances if self.instances.count(address) > 1}):
            raise ValueError(f"instances names {', '.join(twice)} twice")
        return self
