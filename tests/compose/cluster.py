"""The cluster of docker-compose.yml under a name of its own, asked from this machine."""

import base64
import io
import json
import subprocess
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from PIL import Image

from tests.compose.engine import ROOT, Engine, ran, services
from triptych.cli import ports

DIGITS = (3, 7)
ANSWER = "3 7"
_POLL_S = 0.5
_numbers = count()


def new_images() -> list[bytes]:
    """Pictures of ``DIGITS`` that no cache has yet: one corner differs."""
    images = []
    for digit in DIGITS:
        image = Image.open(ROOT / "examples" / "digits" / f"{digit}_a.png").convert("RGB")
        number = next(_numbers)
        for bit in range(16):
            image.putpixel((bit, 0), (number >> bit & 1,) * 3)
        out = io.BytesIO()
        image.save(out, "PNG")
        images.append(out.getvalue())
    return images


@dataclass
class Cluster:
    engine: Engine
    project: str
    ports: dict[str, int]
    compose: tuple[str, ...] = ()
    key: str = ""
    names: tuple[str, ...] = field(default=())
    """The services that run here."""

    @classmethod
    def of(cls, engine: Engine, project: str) -> "Cluster":
        without_gpu = [name for name, service in services().items() if "profiles" not in service]
        here = [name for name in without_gpu if engine.pulls or name != "grafana"]
        published = ("GATEWAY_PORT", "ROUTER_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")
        chosen = dict(zip(published, ports.free(len(published)), strict=True))
        return cls(engine, project, chosen, compose=engine.compose, names=tuple(here))

    # --- compose -----------------------------------------------------------------------------------------------------

    def __call__(self, *command: str, timeout_s: float = 120.0) -> str:
        """``docker compose ...``."""
        environ = {**self.engine.environ, **{name: str(port) for name, port in self.ports.items()}}
        return ran((*self.compose, "--project-name", self.project, *command), environ, timeout_s=timeout_s)

    def up(self, *options: str, timeout_s: float = 300.0) -> None:
        """Start what is not running, without building, and wait until all of it is healthy."""
        self("up", "--detach", "--no-build", *options, *self.names, timeout_s=timeout_s)
        self.wait_healthy(timeout_s)

    def containers(self, service: str = "") -> list[dict[str, Any]]:
        """``docker inspect`` of all of the project, or of a service's."""
        filters = ["--filter", f"label=com.docker.compose.project={self.project}"]
        if service:
            filters += ["--filter", f"label=com.docker.compose.service={service}"]
        found = self.engine.run("ps", "--all", "--quiet", *filters).split()
        inspected: list[dict[str, Any]] = json.loads(self.engine.run("inspect", *found)) if found else []
        # Compose's own one-off containers are not part of the service.
        return [
            container
            for container in inspected
            if container["Config"]["Labels"].get("com.docker.compose.oneoff") != "True"
        ]

    def wait_healthy(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s  # noqa: TID251 - waits for containers
        while unready := self._unready():
            assert time.monotonic() < deadline, f"not healthy: {unready}"  # noqa: TID251
            time.sleep(_POLL_S)

    def _unready(self) -> dict[str, str]:
        states = {}
        for container in self.containers():
            state = container["State"]
            if "Health" in state and state["Health"]["Status"] != "healthy":
                states[container["Name"]] = (
                    f"{state['Status']}, {state['Health']['Status']}, {state['Health'].get('Log')}"
                )
            elif "Health" not in state and state["ExitCode"]:
                states[container["Name"]] = f"exit status {state['ExitCode']}"
        return states

    def left(self) -> list[str]:
        """Everything that carries the project's label."""
        label = f"label=com.docker.compose.project={self.project}"
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return [line for kind in kinds for line in self.engine.run(*kind, "--quiet", "--filter", label).splitlines()]

    # --- questions ---------------------------------------------------------------------------------------------------

    def http(self, path: str, body: object = None, *, key: str | None = None, port: str = "GATEWAY_PORT") -> Any:
        """The JSON that a published port answers, and the headers as ``_headers`` if it is an object."""
        headers = {"content-type": "application/json"}
        if key is None or key:
            headers["authorization"] = f"Bearer {self.key if key is None else key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports[port]}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return {**json.load(answer), "_headers": dict(answer.headers)}

    def ask(self) -> tuple[str, str]:
        """Ask about new pictures; returns the answer and the request's id."""
        urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in new_images()]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content.append({"type": "text", "text": "What digits are shown?"})
        messages = [{"role": "user", "content": content}]
        body = {"model": "triptych-demo", "messages": messages, "temperature": 0}
        answer = self.http("/v1/chat/completions", body)
        return answer["choices"][0]["message"]["content"], answer["_headers"]["x-request-id"]

    def timeline(self, request_id: str) -> Any:
        return self.http(f"/v1/requests/{request_id}/timeline")

    # --- certificates ------------------------------------------------------------------------------------------------

    def certificate_of(self, caller: str, folder: Path) -> tuple[Path, Path, Path]:
        """The certificate, key and authority of a user or an operator, from the cluster."""
        folder.mkdir(exist_ok=True)
        command = (*self.compose, "--project-name", self.project, "run", "--rm", "-T", "init", caller)
        out = subprocess.run(command, env=dict(self.engine.environ), cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(out)) as archive:
            archive.extractall(folder, filter="data")
        return folder / "cert.pem", folder / "key.pem", folder / "ca.pem"

    def certificates_on_disk(self) -> dict[str, str]:
        """Of each service that accepts TLS from others."""
        return {service: self("exec", "-T", service, "cat", "/identity/cert.pem").strip() for service in LISTENING}

    def certificates_in_use(self) -> dict[str, str]:
        """What the same services present, to the pool manager's container."""
        said = self("exec", "-T", "pool-manager", "python", "-c", _PRESENTED, json.dumps(LISTENING))
        found: dict[str, str] = json.loads(said)
        return found


LISTENING = {"redis": 6379, "pool-manager": 50041, "router": 50051, "encoder": 50061, "text": 50071}
_PRESENTED = """
import json, socket, ssl, sys
context = ssl.create_default_context(cafile="/identity/ca.pem")
context.check_hostname = False
context.load_cert_chain("/identity/cert.pem", "/identity/key.pem")
context.set_alpn_protocols(["h2"])
presented = {}
for host, port in json.loads(sys.argv[1]).items():
    with socket.create_connection((host, port), 10) as plain, context.wrap_socket(plain) as connection:
        presented[host] = ssl.DER_cert_to_PEM_cert(connection.getpeercert(True)).strip()
print(json.dumps(presented))
"""


@dataclass
class Load:
    """What became of the questions that were asked meanwhile."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    encoders: set[str] = field(default_factory=set)


@contextmanager
def under_load(cluster: Cluster, *, askers: int = 2) -> Iterator[Load]:
    """Questions one after another, from several threads. At the end none may have failed."""
    load, stop, lock = Load(), threading.Event(), threading.Lock()

    def ask() -> None:
        while not stop.is_set():
            try:
                answer, request_id = cluster.ask()
                items = cluster.timeline(request_id)["items"]
            except Exception as error:  # noqa: BLE001 - every failure counts
                with lock:
                    load.wrong.append(f"{type(error).__name__}: {error}{_body(error)}")
                stop.wait(_POLL_S)
                continue
            with lock:
                load.encoders |= {item["encoder"] for item in items}
                if answer == ANSWER:
                    load.right += 1
                else:
                    load.wrong.append(f"answered {answer!r}")

    threads = [threading.Thread(target=ask) for _ in range(askers)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not load.wrong, load.wrong[:10]
    assert load.right


def _body(error: Exception) -> str:
    return f" {error.read().decode()}" if isinstance(error, urllib.error.HTTPError) else ""


def wait_for(load: Load, more: int, *, timeout_s: float = 120.0) -> None:
    """Until so many more questions were answered rightly."""
    wanted, deadline = load.right + more, time.monotonic() + timeout_s  # noqa: TID251
    while load.right < wanted and not load.wrong:
        assert time.monotonic() < deadline, f"{load.right} answers, {wanted} wanted"  # noqa: TID251
        time.sleep(_POLL_S)


def wait_until(met: Any, what: str, *, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s  # noqa: TID251
    while not met():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"  # noqa: TID251
        time.sleep(_POLL_S)


def build(engine: Engine, secrets: Sequence[str], service: str) -> str:
    """Build a service's image as docker-compose.yml says, and return its name."""
    definition = services()[service]
    arguments = [
        f"--build-arg={name}={value.partition(':-')[2].rstrip('}') if value.startswith('${') else value}"
        for name, value in definition["build"].get("args", {}).items()
    ]
    file = ("--file", definition["build"]["dockerfile"], "--tag", definition["image"], definition["build"]["context"])
    engine.run("build", "--quiet", "--network=host", *secrets, *arguments, *file, timeout_s=1200)
    return str(definition["image"])
