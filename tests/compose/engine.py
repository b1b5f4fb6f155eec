"""A container engine for ``make test-compose``: the one that is there, or one of its own.

Where Docker runs and its registry answers, both are used as they are. Elsewhere, as root on Debian, the packages are
installed and a daemon is started with directories and a socket of its own, which end with the test. Where images
cannot be pulled, others take their names: Debian with Python, Redis and Prometheus. Grafana cannot be had in this way.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import yaml

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "compose"
PYTHON_IMAGE = "python:3.11-slim-bookworm"
_PACKAGES = {
    "dockerd": "docker.io",
    "docker-compose": "docker-compose",
    "iptables": "iptables",
    "mmdebstrap": "mmdebstrap",
}
_SHARED = (Path("/opt/containerd"),)
"""What a daemon makes wherever its own directories are."""
_CHAINS = {
    "filter": ":INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n",
    "nat": ":PREROUTING ACCEPT [0:0]\n:INPUT ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]\n",
}
"""The tables that a daemon uses, when nothing is in them."""
_START_S = 60.0
_STOP_S = 30.0


class NoEngine(Exception):
    """No container engine can be had here; the message says why."""


def say(text: str) -> None:
    sys.stderr.write(f"compose: {text}\n")
    sys.stderr.flush()


@dataclass(frozen=True)
class Engine:
    docker: str
    """The client's path."""
    environ: Mapping[str, str]
    pulls: bool
    """Whether images can be pulled; without it stand-ins have their names."""

    def run(self, *command: str, timeout_s: float = 120.0, check: bool = True) -> str:
        """Run the client and return its output. Raises AssertionError with what it said when it fails."""
        return ran((self.docker, *command), self.environ, timeout_s=timeout_s, check=check)

    @property
    def compose(self) -> tuple[str, ...]:
        """Compose, version 2 where it is there."""
        try:
            self.run("compose", "version")
        except AssertionError:
            return (str(shutil.which("docker-compose")),)
        return (self.docker, "compose")


def ran(command: Sequence[str], environ: Mapping[str, str], *, timeout_s: float, check: bool = True) -> str:
    done = subprocess.run(
        command, env=dict(environ), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout[-4000:]}{done.stderr[-8000:]}"
    return done.stdout


@contextmanager
def container_engine() -> Iterator[Engine]:
    """Raises NoEngine."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("COMPOSE_", "TRIPTYCH_"))}  # noqa: TID251 - passed on
    with ExitStack() as stack:
        engine = _running(environ) or stack.enter_context(_own_daemon(environ))
        if not engine.pulls:
            try:
                _make_stand_ins(engine)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                raise NoEngine(f"Debian cannot be had as a base image: {error}") from None
        yield engine


def _running(environ: Mapping[str, str]) -> Engine | None:
    """The daemon that is there, if it also has the base image or can pull it."""
    docker = shutil.which("docker")
    if docker is None:
        return None
    engine = Engine(docker, environ, pulls=True)
    try:
        engine.run("info", timeout_s=20)
    except (AssertionError, subprocess.TimeoutExpired):
        return None
    try:
        engine.run("image", "inspect", PYTHON_IMAGE)
    except AssertionError:
        try:
            engine.run("pull", PYTHON_IMAGE, timeout_s=300)
        except (AssertionError, subprocess.TimeoutExpired):
            say("Docker runs here, but no image can be pulled: another daemon with stand-ins is used")
            return None
    return engine


@contextmanager
def _own_daemon(environ: Mapping[str, str]) -> Iterator[Engine]:
    """A daemon that leaves nothing behind."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NoEngine("neither a Docker daemon that can pull images, nor root and apt to set one up")
    missing = [package for command, package in _PACKAGES.items() if shutil.which(command) is None]
    if missing:
        say(f"installing {' '.join(missing)}")
        quiet = {**environ, "DEBIAN_FRONTEND": "noninteractive"}
        try:
            ran(("apt-get", "update", "-qq"), quiet, timeout_s=300)
            ran(("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing), quiet, timeout_s=600)
        except AssertionError as error:
            raise NoEngine(f"the packages cannot be installed: {error}") from None
    home = Path(tempfile.mkdtemp(prefix="triptych-compose-", dir="/var/tmp"))
    socket = f"unix://{home}/docker.sock"
    # Debian's client builds by BuildKit on its own; others need a plug-in for that.
    client = next(path for path in ("/usr/bin/docker", shutil.which("docker")) if path and Path(path).exists())
    engine = Engine(client, {**environ, "DOCKER_HOST": socket, "DOCKER_BUILDKIT": "1"}, pulls=False)
    log = home / "daemon.log"
    own = ("--data-root", home / "data", "--exec-root", home / "run", "--pidfile", home / "pid", "--host", socket)
    with ExitStack() as stack:
        stack.callback(_remove, home, [path for path in _SHARED if not path.exists()])
        stack.enter_context(_network_as_before())
        with log.open("wb") as out:
            daemon = subprocess.Popen(("dockerd", "--bridge=none", *own), stdout=out, stderr=out, env=dict(environ))
        stack.callback(_stop, daemon)
        deadline = time.monotonic() + _START_S  # noqa: TID251 - waits for a process
        while "API listen" not in log.read_text():
            if daemon.poll() is not None or time.monotonic() > deadline:  # noqa: TID251
                raise NoEngine(f"dockerd does not start here: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield engine


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


@contextmanager
def _network_as_before() -> Iterator[None]:
    """A daemon leaves rules of the packet filter behind, one of which drops what is forwarded."""
    forwarding = Path("/proc/sys/net/ipv4/ip_forward")
    before, rules = forwarding.read_text(), subprocess.run(("iptables-save",), capture_output=True, check=True).stdout
    tables = [line[1:] for line in rules.decode().splitlines() if line.startswith("*")]
    empty = "".join(f"*{name}\n" + _CHAINS[name] + "COMMIT\n" for name in _CHAINS if name not in tables)
    try:
        yield
    finally:
        subprocess.run(("iptables-restore",), input=rules + empty.encode(), check=True)
        forwarding.write_text(before)


def _remove(home: Path, more: Sequence[Path]) -> None:
    """A daemon's directories, with what is still mounted in them."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((source for source in mounts if source.startswith(f"{home}/")), reverse=True):
        subprocess.run(("umount", "-l", mount), check=False, capture_output=True)
    layers = [path for path in (home / "data" / "overlay2").glob("*") if path.is_dir()]
    with ThreadPoolExecutor(8) as threads:  # hundreds of thousands of files: each thread mostly waits for the disk
        list(threads.map(shutil.rmtree, layers))
    shutil.rmtree(home)
    for path in more:
        shutil.rmtree(path, ignore_errors=True)


_STAND_INS = f"""\
FROM {PYTHON_IMAGE} AS tools
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus redis-server >/dev/null \\
    && install -d -o 999 -g 999 /data && install -d -o 65534 -g 65534 /prometheus
FROM tools AS redis
WORKDIR /data
CMD ["redis-server"]
FROM tools AS prometheus
ENTRYPOINT ["prometheus"]
"""


def _make_stand_ins(engine: Engine) -> None:
    """Debian under the names of the images that the Dockerfiles and docker-compose.yml start from."""
    base = CACHE / "base.tar"
    if not base.exists():
        say("making a base image of Debian packages, once")
        CACHE.mkdir(parents=True, exist_ok=True)
        new = base.with_suffix(".new.tar")
        sources = [*Path("/etc/apt/sources.list.d").glob("*.sources"), *Path("/etc/apt/sources.list.d").glob("*.list")]
        lists = [path for path in (Path("/etc/apt/sources.list"), *sources) if path.exists()]
        options = ("--variant=minbase", "--include=ca-certificates,python3,python3-venv", "--quiet")
        ran(("mmdebstrap", *options, "bookworm", str(new), *map(str, lists)), engine.environ, timeout_s=900)
        new.rename(base)
    engine.run("import", str(base), PYTHON_IMAGE, timeout_s=120)
    images = {service: definition["image"] for service, definition in services().items() if "image" in definition}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "Dockerfile").write_text(_STAND_INS)
        for target in ("redis", "prometheus"):
            command = ("build", "--quiet", "--network", "host", "--target", target, "--tag", images[target], folder)
            engine.run(*command, timeout_s=600)


def services() -> dict[str, dict[str, Any]]:
    """The services of docker-compose.yml."""
    found: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return found


@contextmanager
def pip_secrets(engine: Engine) -> Iterator[tuple[str, ...]]:
    """Options of ``docker build`` by which pip in the build is configured as it is here.

    Directories of packages on this machine are served to it over loopback.
    """
    out = ran((sys.executable, "-m", "pip", "config", "list"), engine.environ, timeout_s=60)
    settings: dict[str, list[str]] = {}
    for line in out.splitlines():  # those of the environment come first and count
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        if key in ("cert", "index-url", "extra-index-url", "find-links", "trusted-host"):
            settings.setdefault(key, value.strip("'").replace("\\n", " ").split())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options: list[str] = []
        if certificates := settings.pop("cert", None):
            options += ["--secret", f"id=ca.pem,src={certificates[0]}"]
            settings["cert"] = ["/run/secrets/ca.pem"]
        for key in ("index-url", "extra-index-url", "find-links"):
            served = (stack.enter_context(_served(address)) for address in settings.get(key, ()))
            if kept := [address for address in served if address]:
                settings[key] = kept
            else:
                settings.pop(key, None)
        if settings:
            file = folder / "pip.conf"
            file.touch(0o600)
            lines = [f"{key} = {' '.join(values)}" for key, values in settings.items()]
            file.write_text("\n".join(("[global]", *lines, "")))
            options += ["--secret", f"id=pip.conf,src={file}"]
        yield tuple(options)


@contextmanager
def _served(location: str) -> Iterator[str]:
    """Where the build finds a location of packages: a directory of this machine is served; empty if it is not there."""
    url = urlparse(location)
    if url.scheme not in ("", "file"):
        yield location
        return
    directory = Path(url.path)
    if not directory.is_dir():
        yield ""
        return
    # The pages of an index lead to files beside it.
    shown = directory.parent if url.scheme == "file" else directory

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *args, **options: Handler(*args, directory=str(shown), **options)
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        at = f"http://127.0.0.1:{server.server_port}/"
        yield at if shown == directory else f"{at}{directory.name}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def image_sizes(engine: Engine, names: Sequence[str]) -> dict[str, int]:
    """Bytes of each image, without those of the base image."""
    found = json.loads(engine.run("image", "inspect", PYTHON_IMAGE, *names))
    sizes = [image["Size"] for image in found]
    return {name: size - sizes[0] for name, size in zip(names, sizes[1:], strict=True)}
