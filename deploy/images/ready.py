"""The health check of every image: exit status 0 when ``/ready``, or the path that is given, of the service's admin port answers 200.

A bare socket: an HTTP client takes longer to import than the whole check.
"""

import socket
import sys

_ADMIN_PORT = 9100
_TIMEOUT_S = 3.0

path = sys.argv[1] if len(sys.argv) > 1 else "/ready"

try:
    with socket.create_connection(("127.0.0.1", _ADMIN_PORT), _TIMEOUT_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        with connection.makefile("rb") as answer:
            status, _, body = answer.read(4096).partition(b"\r\n\r\n")
except OSError as error:
    sys.exit(f"the admin port does not answer: {error}")
if b" 200 " not in status.split(b"\r\n")[0]:
    sys.exit(body.decode(errors="replace") or "the admin port gave no answer")
