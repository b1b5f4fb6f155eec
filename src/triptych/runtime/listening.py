"""Check that a port can be listened on."""

import socket


def listen_error(host: str, port: int) -> OSError | None:
    """The error that listening on the port would give now, if any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: ignores old connections
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None
