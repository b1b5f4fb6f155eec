"""Settings of the gateway."""

import re
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn, Self

from pydantic import Field, field_validator, model_validator

from triptych.machine.membership_view import ViewLimits
from triptych.media.fetch import FetchLimits
from triptych.media.remote_url import HostRules
from triptych.policy.addresses import why_not_called
from triptych.runtime.manager_access import ManagerAccess
from triptych.runtime.settings import ServiceSettings, SettingsError, Strings, service_config

from .keys import read_key_file
from .response_store import StoreLimits

_MAX_ROUTERS = 64
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")


@dataclass(frozen=True, slots=True)
class RestTls:
    """TLS of the REST port. Callers need no certificate; API keys tell who they are."""

    rest_tls_cert: Path | None = None
    """Certificate of the REST port (PEM). With it and rest_tls_key, the port takes https only. Files that are replaced are used
    for new connections."""
    rest_tls_key: Path | None = None
    """Private key of the certificate (PEM)."""

    def __post_init__(self) -> None:
        if (self.rest_tls_cert is None) != (self.rest_tls_key is None):
            raise ValueError("rest_tls_cert and rest_tls_key need each other")

    @property
    def files(self) -> tuple[Path, Path] | None:
        """Certificate and key; None without TLS."""
        if self.rest_tls_cert is None or self.rest_tls_key is None:
            return None
        return self.rest_tls_cert, self.rest_tls_key


class GatewaySettings(ServiceSettings):
    model_config = service_config("gateway")

    host: str = "127.0.0.1"
    """IP address to listen on. A non-loopback address needs keys or allow_anyone, and TLS or allow_network."""
    port: int = Field(default=8000, ge=0, le=65535)
    """TCP port to listen on; 0 picks a free one and logs it."""
    router: Strings = ("127.0.0.1:50051",)
    """HOST:PORT of the router, or of several: each request goes to one that serves its model."""
    managers: ManagerAccess = ManagerAccess()
    """Pool managers that name the routers instead."""
    lost_members: ViewLimits = ViewLimits()
    """Use of routers that a pool manager no longer lists."""
    mount_router: str = ""
    """Command line of a router to run in this process, instead of the one at ``router``: one hop less per token."""
    keys: Path | None = None
    """File of API keys (python -m triptych.services.gateway.keys new NAME). With it, every route except /health needs a key."""
    allow_anyone: bool = False
    """Allow a non-loopback address without keys: anyone who reaches the port can send requests."""
    rest_tls: RestTls = RestTls()
    """TLS of the REST port."""
    allow_network: bool = False
    """Allow a non-loopback address without TLS: requests, answers and keys can then be read on the way, unless a proxy in
    front of the port encrypts them."""
    allowed_hosts: Strings = ()
    """Further names for the Host header beside localhost and loopback addresses. Applies without keys on loopback, where
    other names are refused against DNS rebinding."""
    allowed_origins: Strings = ()
    """Origins of web pages that may call the gateway from a browser (CORS): https://HOST, http://HOST:PORT, or * for all."""
    tenants_share: bool = False
    """Whether requests of different keys may share cached embeddings. Response times then reveal what others have sent."""
    fetch: bool = True
    """Whether images, videos and audio are fetched from https: and http: URLs."""
    fetch_rules: HostRules = HostRules()
    """Hosts that URLs may be fetched from."""
    fetch_limits: FetchLimits = FetchLimits()
    """Limits of fetching URLs."""
    max_urls_per_request: int = Field(default=16, ge=1)
    """Most URLs to fetch per request; more are answered 400."""
    max_connections: int = Field(default=4096, ge=1)
    """Most open connections; one more is answered 429."""
    max_concurrent_requests: int = Field(default=2048, ge=1)
    """Most chat requests at the same time; one more is answered 429."""
    max_body_bytes: int = Field(default=64 << 20, ge=1024)
    """Largest request body; a larger one is answered 413. Without its images, videos and audio it may have 16 MiB."""
    head_timeout_s: int = Field(default=20, ge=1, le=3600)
    """Time for a request's headers to arrive, from the opening of the connection or their first byte."""
    keep_alive_s: int = Field(default=75, ge=1, le=3600)
    """Time that a connection without a request stays open after a response. Proxies in front keep theirs shorter."""
    body_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Time for a request's body to arrive, regardless of x-request-timeout; a slower one is answered 408."""
    max_buffered_bytes: int = Field(default=1 << 30, ge=1024)
    """Most body bytes held at the same time, over all requests; a body that does not fit is answered 429."""
    max_item_bytes: int = Field(default=32 << 20, ge=1)
    """Largest image, video or audio clip, after base64 decoding."""
    request_timeout_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    """Default timeout of a request; the header x-request-timeout overrides it."""
    max_request_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Largest x-request-timeout."""
    response_store: StoreLimits = StoreLimits()
    """Limits of the responses that are stored (POST /v1/responses)."""
    parse_threads: int = Field(default=2, ge=1, le=64)
    """Threads that parse large bodies."""
    parse_inline_bytes: int = Field(default=32 << 10, ge=0)
    """Bodies up to this size are parsed on the event loop, which is faster than a thread."""

    @field_validator("router")
    @classmethod
    def _routers_are_hosts_and_ports(cls, router: tuple[str, ...]) -> tuple[str, ...]:
        for address in router:
            if (reason := why_not_called(address, beyond_loopback=True)) is not None:
                raise ValueError(f"{address!r}: {reason}")
        if not 1 <= len(set(router)) == len(router) <= _MAX_ROUTERS:
            raise ValueError(f"router names from 1 to {_MAX_ROUTERS} routers, each once")
        return router

    @field_validator("allowed_origins")
    @classmethod
    def _origins_are_as_browsers_write_them(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not an origin: https://HOST or http://HOST:PORT, in lower case and without a path, or *"
                )
        return origins

    @model_validator(mode="after")
    def _routers_have_one_source(self) -> Self:
        sources = {
            "router": "router" in self.model_fields_set,
            "mount_router": bool(self.mount_router),
            "pool_manager": bool(self.managers.pool_manager),
        }
        if len(given := [name for name, is_given in sources.items() if is_given]) > 1:
            raise ValueError(f"{' and '.join(given)} both name routers: give only one")
        return self

    @field_validator("host")
    @classmethod
    def _host_is_an_address(cls, host: str) -> str:
        ip_address(host)
        return host

    @model_validator(mode="after")
    def _public_without_keys_or_tls_is_explicit(self) -> Self:
        if not self.is_loopback and self.keys is None and not self.allow_anyone:
            raise ValueError(
                f"host ({self.host}) is not a loopback address: set --keys, or --allow-anyone to serve without keys"
            )
        if not self.is_loopback and self.rest_tls.files is None and not self.allow_network:
            raise ValueError(
                f"host ({self.host}) is not a loopback address: set --rest-tls-cert and --rest-tls-key, or --allow-network to "
                "serve without TLS"
            )
        return self

    @model_validator(mode="after")
    def _limits_fit_together(self) -> Self:
        if self.max_body_bytes > self.max_buffered_bytes:
            raise ValueError(
                f"max_body_bytes ({self.max_body_bytes}) exceeds max_buffered_bytes ({self.max_buffered_bytes}): "
                "such a body could never be accepted"
            )
        if self.request_timeout_s > self.max_request_timeout_s:
            raise ValueError(
                f"request_timeout_s ({self.request_timeout_s}) exceeds max_request_timeout_s "
                f"({self.max_request_timeout_s})"
            )
        return self

    def print_and_exit(self) -> NoReturn:
        """Raises SettingsError for a file of keys with which the gateway would not start."""
        if self.keys is not None:
            try:
                read_key_file(self.keys)
            except ValueError as error:
                raise SettingsError(f"keys: {error}") from None
        super().print_and_exit()

    @property
    def hosts(self) -> frozenset[str] | None:
        """Accepted Host headers beside loopback addresses; None for any."""
        if not self.is_loopback or self.keys is not None or self.allow_anyone:
            return None
        return frozenset(("localhost", *(name.lower().removesuffix(".") for name in self.allowed_hosts)))

    @property
    def is_loopback(self) -> bool:
        return ip_address(self.host).is_loopback
