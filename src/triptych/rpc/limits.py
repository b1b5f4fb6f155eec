"""Limits and channel options shared by all clients and servers."""

from triptych.domain.limits import MAX_MESSAGE_NBYTES

DESCRIBE_TIMEOUT_S = 5.0
RELEASE_TIMEOUT_S = 5.0
QUERY_TIMEOUT_S = 10.0
"""Outer limits, as every call has a deadline; callers have tighter ones in their settings."""
WATCH_TIMEOUT_S = 3600.0
"""A watch is renewed at least this often, as every call has a deadline."""
LOAD_LORA_TIMEOUT_S = 300.0
"""Files of adapters may lie on slow disks."""
DEFAULT_CALL_TIMEOUT_S = 120.0
"""Timeout of callers that set no deadline, seconds."""
MAX_CALL_TIMEOUT_S = 86_400.0
"""Longer deadlines are cut to this."""
BATCH_NBYTES = 256 << 10
"""A message of ``Calls.Exchange`` of this size gets nothing added. With one more request or answer, it is below the
least value of the setting ``max_message_bytes``."""
MAX_BATCHED_REQUESTS = 4096
"""Requests in one message of ``Calls.Exchange``."""
MOST_AT_ONCE = 64
"""Requests or answers of one message of ``Calls.Exchange`` that are passed on before the event loop does other work. Each wakes a
task: with thousands of streams a message has one answer of each, and nothing else would run until all were handled."""
WINDOW_NBYTES = 256 << 10
"""A call's answers that were sent in ``Calls.Exchange`` and not read by the client's caller; one message may exceed it."""
MAX_UNSENT_ANSWERS = 1024
"""Most calls of ``Calls.Exchange`` whose answers wait to be sent; with more, no requests are read from it."""
MESSAGE_NBYTES = 64
"""Part of ``WINDOW_NBYTES`` that the objects around a message take, besides its own size."""
_MAX_PENDING_CALLS = 65_536
_MAX_PENDING_S = 3600
"""Limits of calls that have arrived but not been accepted by the event loop. Above its own limits (1000 calls, 30 s)
gRPC cancels calls at random. That looks like a cancellation by the client, while ``max_concurrent_calls`` refuses with
a message.
"""

KEEPALIVE_MS = 10_000
"""A client pings a server this long after it last heard from it."""
MIN_PING_INTERVAL_MS = 5_000
"""A server closes the connection of a client that pings more often (gRPC's own limit is 5 minutes)."""


def channel_options(server_name: str | None = None) -> tuple[tuple[str, int | str], ...]:
    """Options of a client's channel. ``server_name`` is the one in the server's certificate, if it is not the host."""
    return (
        *((("grpc.ssl_target_name_override", server_name),) if server_name else ()),
        ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
        ("grpc.enable_retries", 0),  # callers retry, as they know what a retry costs
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 2_000),  # time that an attempt to connect has; not a pause
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),  # peers are internal: ignore a proxy from the environment
    )


def server_options(max_message_nbytes: int) -> tuple[tuple[str, int], ...]:
    """Options of a server that accepts messages up to this size."""
    return (
        ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
        ("grpc.max_receive_message_length", max_message_nbytes),
        ("grpc.so_reuseport", 0),  # a port in use must be an error
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", _MAX_PENDING_S),
    )
