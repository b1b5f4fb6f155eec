"""A stub of any service: accepts all flags, and reports ready on its admin port.

As the gateway it also reports a ready cluster, there and on its own port.
"""

import argparse
import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--admin-port", type=int, required=True)
parser.add_argument("--router")
parser.add_argument("--mount-router")
parser.add_argument("--instances", default=os.environ.get("TRIPTYCH_STUB_INSTANCES", ""))  # noqa: TID251
parser.add_argument("--stubborn", action="store_true")
parser.add_argument("--ends-well", action="store_true", help="with status 0 when it is told to end, as services do")
parser.add_argument("--broken", action="store_true")
parser.add_argument("--broken-if", type=Path, help="a file: while it exists, the process cannot start")
parser.add_argument("--slow-if", type=Path, help="a file: while it exists, the process starts and never ends starting")
parser.add_argument("--pid", type=int, default=os.getpid(), help="whose process it says that it is")
arguments, _ = parser.parse_known_args()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ready = [f"{name}: ready" for name in arguments.instances.split(",") if name]
        missing = ["it is starting"] if slow else []
        status = {"ready": not slow, "missing": missing, "instances": ready, "pid": arguments.pid}
        body = json.dumps(ready if self.path == "/instances" else status).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


slow = arguments.slow_if is not None and arguments.slow_if.exists()
if arguments.broken or (arguments.broken_if is not None and arguments.broken_if.exists()):
    sys.exit("there is nothing to serve")
if arguments.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if arguments.ends_well:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
admin = HTTPServer(("127.0.0.1", arguments.admin_port), Handler)
threading.Thread(target=admin.serve_forever, daemon=True).start()
if arguments.router or arguments.mount_router:
    HTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()
while True:
    signal.pause()
