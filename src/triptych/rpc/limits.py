"""Bounds and habits that every channel and server shares."""

MAX_MESSAGE_NBYTES = 256 * 2**20
"""Of one gRPC message; services bound what they take more tightly, with better errors."""
DESCRIBE_TIMEOUT_S = 5.0
RELEASE_TIMEOUT_S = 5.0
QUERY_TIMEOUT_S = 10.0
"""Outer bounds: no call is without one; callers have tighter ones in their settings."""
WATCH_TIMEOUT_S = 3600.0
"""A watch is renewed at least this often: no call is made without a deadline."""
DEFAULT_CALL_TIMEOUT_S = 120.0
"""For callers of a server who set no deadline of their own."""
MAX_CALL_TIMEOUT_S = 86_400.0
"""A deadline further off is brought to this."""
_MAX_PENDING_CALLS = 65_536
_MAX_PENDING_S = 3600
"""Calls that arrived and that the event loop has not accepted yet. gRPC cancels at random from its own limits on (1000
calls, 30 s), which callers cannot tell from a cancellation of theirs: ``max_concurrent_calls`` refuses in words."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.enable_retries", 0),  # what may be repeated is decided above, where its cost is known
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # peers are inside: a proxy from the environment is not for them
)


def server_options(max_message_nbytes: int) -> tuple[tuple[str, int], ...]:
    """For a server that takes messages up to this size."""
    return (
        ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
        ("grpc.max_receive_message_length", max_message_nbytes),
        ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a lottery
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", _MAX_PENDING_S),
    )
