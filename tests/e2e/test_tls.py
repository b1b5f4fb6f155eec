"""A cluster under mutual TLS: who is refused where, and new certificates under load."""

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests import identities
from tests.contract.store_kit import RedisServer
from tests.e2e.client import post, rest, text_of, timeline_of
from tests.e2e.delayed import delayed
from tests.e2e.reference import DIGITS, Question
from triptych import AsyncClient
from triptych.cli.authority import CERTIFICATE, KEY, TRUSTED, Authority
from triptych.cli.cluster import LocalCluster
from triptych.client import RetryPolicy
from triptych.errors import NotFound, PermissionDenied, Unavailable
from triptych.rpc.server import RpcServer
from triptych.rpc.stubs import InstanceStub, PoolManagerStub, RouterStub
from triptych.runtime.tls import TlsIdentity
from triptych.services.pool_manager.servicer import SERVICE_NAME as ANY_SERVICE
from triptych.transport.tcp_wire import NO_LEASE, Read, TcpOffer

TWO = Question("What digits are shown?", ("3_a", "1_a"))
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
PULL = Read(1, NO_LEASE, 0, 1).pack()
REFUSED_WITHIN_S = 120.0
USED_WITHIN_S = 120.0


def options(folder: Path, redis: RedisServer) -> dict[str, tuple[str, ...]]:
    """Engines that sleep, and arenas as on a device: embeddings use the same path as with memory that the CPU cannot read."""
    engines = delayed(folder.parent)
    own = {name: identities.flags(folder / name) for name in ("gateway", "router", "pool-manager", "encoder", "text")}
    return {
        "gateway": own["gateway"],
        "router": own["router"],
        "pool_manager": (*own["pool-manager"], "--redis", f"127.0.0.1:{redis.port}", "--redis-tls"),
        "encoder": (*own["encoder"], *engines["encoder"], "--arena", "device"),
        "text": (*own["text"], *engines["text"], "--arena", "device"),
    }


@asynccontextmanager
async def redis_of(folder: Path, own: Path) -> AsyncIterator[RedisServer]:
    certificate, key, trusted = identities.files(own)
    files = (f"tls-cert-file {certificate}", f"tls-key-file {key}", f"tls-ca-cert-file {trusted}")
    server = RedisServer(folder, (*files, "tls-auth-clients yes"), tls=True)
    await asyncio.to_thread(server.start)
    try:
        yield server
    finally:
        server.kill()


@asynccontextmanager
async def scaler_of(own: Path) -> AsyncIterator[int]:
    """What a scaler in another process listens with."""
    tls = identities.identity(own)
    async with RpcServer(
        host="127.0.0.1", port=0, service_names=(ANY_SERVICE,), register=lambda _: None, tls=tls
    ) as server:
        yield server.port


def callers(folder: Path, made: Authority) -> dict[str, ssl.SSLContext | None]:
    """Ways to connect, by name. All trust the cluster, so that only its own check is left. None is without TLS."""
    stranger = identities.authority(folder / "stranger")
    own: dict[str, Path] = {
        "trusted": folder / "ca" / "text",
        "user": folder / "ca" / "user",
        "wrong authority": identities.issue(stranger, "user", serves=False),
        "expired": identities.issue(made, "expired", serves=False, lifetime=-timedelta(minutes=1)),
    }
    found: dict[str, ssl.SSLContext | None] = {"without TLS": None}
    for name in ("without a certificate", *own):
        context = ssl.create_default_context(cafile=str(made.folder / "ca.pem"))
        context.check_hostname = False
        context.set_alpn_protocols(["h2"])
        if name in own:
            context.load_cert_chain(own[name] / CERTIFICATE, own[name] / KEY)
        found[name] = context
    return found


async def is_answered(port: int, greeting: bytes, context: ssl.SSLContext | None) -> bool:
    """Whether a server says anything but that it refuses."""
    reader = writer = None
    try:
        async with asyncio.timeout(REFUSED_WITHIN_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(greeting)
            said = await reader.read(1024)
    except (ssl.SSLError, ConnectionError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()
    return said != b"" and not said.startswith(b"\x15")  # a TLS alert


async def pull_port(target: str, own: Path) -> int:
    stub = InstanceStub(target, identities.identity(own))
    try:
        (offer,) = [
            TcpOffer.parse(described) for described in (await stub.describe()).offers if described.backend == "tcp"
        ]
        return offer.port
    finally:
        await stub.close()


async def test_a_cluster_under_mutual_tls(tmp_path: Path) -> None:
    made = identities.cluster(tmp_path / "ca")
    ca = made.folder
    async with (
        redis_of(tmp_path, ca / "redis") as redis,
        scaler_of(ca / "scaler") as scaler_port,
        LocalCluster(roles="E:2,PD:1", options=options(ca, redis), log_dir=tmp_path / "logs") as cluster,
        rest(cluster.url) as client,
    ):
        await embeddings_travel_over_tcp(client)
        ports = {
            name: (port_of(cluster.targets[name]), HTTP2) for name in ("encoder-1", "text-1", "router", "pool-manager")
        }
        ports |= {"scaler": (scaler_port, HTTP2), "redis": (redis.port, b"PING\r\n")}
        ports["tcp pulls"] = (await pull_port(cluster.targets["encoder-1"], ca / "router"), PULL)
        await only_the_trusted_are_answered(ports, callers(tmp_path, made))
        await refusals_are_logged(cluster)
        await callers_are_told(cluster, tmp_path)
        await sdk_and_command_take_a_users_certificate(cluster, ca / "user")
        await new_certificates_lose_no_request(cluster, made)


def port_of(target: str) -> int:
    return int(target.rpartition(":")[2])


async def embeddings_travel_over_tcp(client: Any) -> None:
    response = await post(client, TWO.body())
    assert text_of(response)
    timeline = await timeline_of(client, response)
    assert {item["pull_backend"] for item in timeline["items"]} == {"tcp"}


async def only_the_trusted_are_answered(
    ports: Mapping[str, tuple[int, bytes]], contexts: Mapping[str, ssl.SSLContext | None]
) -> None:
    cases = [(port, caller) for port in ports for caller in contexts]
    answered = await asyncio.gather(*(is_answered(*ports[port], contexts[caller]) for port, caller in cases))
    assert dict(zip(cases, answered, strict=True)) == {
        (port, caller): caller == "trusted" or (caller == "user" and port != "tcp pulls") for port, caller in cases
    }


async def refusals_are_logged(cluster: LocalCluster) -> None:
    """Callers may know before it is written."""
    told = [(name, "Handshake failed with error") for name in ("encoder-1", "text-1", "router", "pool-manager")]
    for name, line in (*told, ("encoder-1", "a TLS connection was refused: ")):
        async with asyncio.timeout(REFUSED_WITHIN_S):
            while line not in (cluster.log_dir / f"{name}.log").read_text():  # noqa: ASYNC110 - other processes write
                await asyncio.sleep(0.1)


async def callers_are_told(cluster: LocalCluster, folder: Path) -> None:
    user = identities.identity(folder / "ca" / "user")
    stranger = identities.identity(folder / "stranger" / "user")
    for stub, call, told in (
        (RouterStub(cluster.router_target), "models", "may want TLS"),
        (RouterStub(cluster.router_target, stranger), "models", "the TLS handshake failed: unable to get local issuer"),
        (RouterStub(cluster.targets["encoder-1"], user), "models", "the peer's certificate has another name"),
        (PoolManagerStub(cluster.targets["text-1"], user), "status", "the peer's certificate has another name"),
    ):
        with pytest.raises(Unavailable, match=told):
            await getattr(stub, call)()
        await stub.close()
    once = RetryPolicy(max_attempts=1)
    async with AsyncClient(cluster.router_target, tls=stranger, retry=once) as sdk:
        with pytest.raises(Unavailable, match=r"no router can be called at .*: the TLS handshake failed"):
            await sdk.models()
    # A user is no service and no operator.
    operator = identities.identity(folder / "ca" / "operator")
    encoder = InstanceStub(cluster.targets["encoder-1"], user)
    with pytest.raises(PermissionDenied, match=r"Describe needs a certificate for instance\..* or router\."):
        await encoder.describe()
    await encoder.close()
    for caller, refusal in ((user, PermissionDenied), (operator, NotFound)):
        manager = PoolManagerStub(cluster.manager_target, caller)
        with pytest.raises(refusal):
            await manager.drain_instance("nobody", force=False)
        await manager.close()
    # A user's certificate is for calls only.
    async with scaler_of(folder / "ca" / "user") as port:
        posing = RouterStub(f"127.0.0.1:{port}", user)
        with pytest.raises(Unavailable, match="unsupported certificate purpose"):
            await posing.models()
        await posing.close()


async def sdk_and_command_take_a_users_certificate(cluster: LocalCluster, own: Path) -> None:
    async with AsyncClient(cluster.router_target, tls=identities.identity(own)) as sdk:
        images = [DIGITS / f"{name}.png" for name in TWO.images]
        assert (await sdk.chat(TWO.text, images, temperature=0, max_tokens=2)).text
    command = (sys.executable, "-m", "triptych.cli", "status", "--url", cluster.url)
    for flags in (identities.flags(own), ()):
        process = await asyncio.create_subprocess_exec(
            *command, "--pool-manager", cluster.manager_target, *flags, stdout=asyncio.subprocess.PIPE
        )
        shown = (await process.communicate())[0].decode()
        assert ("leads" in shown, "does not answer" in shown) == (bool(flags), not flags)


async def new_certificates_lose_no_request(cluster: LocalCluster, made: Authority) -> None:
    """The authority is replaced in three steps while requests run; then its old certificates open nothing."""
    ca, own = made.folder, made.folder / "user"
    before = {file: (own / file).read_bytes() for file in (CERTIFICATE, KEY, TRUSTED)}
    old = ca.parent / "old"
    old.mkdir()
    names = {path.name: identities.names(path) for path in ca.iterdir() if path.is_dir() and path.name != "expired"}
    async with asyncio.TaskGroup() as group:
        asking = [Asking(cluster, own) for _ in range(2)]
        for asker in asking:
            group.create_task(asker.run())
        new = Authority.create(ca, timedelta(days=1), identities.now(), beside=made.trusted)

        def share() -> None:
            for name in names:
                new.share(name)

        def renew() -> None:
            for name, (known, serves) in names.items():
                identities.issue(new, name, *known, serves=serves)

        await replaced(cluster, asking, share)
        await replaced(cluster, asking, renew)
        new.trust_only_itself(())
        await replaced(cluster, asking, share)
        for asker in asking:
            asker.is_over = True
    for file, data in before.items():
        (old / file).write_bytes(data)
    (old / TRUSTED).write_bytes(new.trusted_pem)
    outside = identities.identity(old)
    for stub, call in (
        (RouterStub(cluster.router_target, outside), "models"),
        (InstanceStub(cluster.targets["encoder-1"], outside), "describe"),
        (InstanceStub(cluster.targets["text-1"], outside), "describe"),
        (PoolManagerStub(cluster.manager_target, outside), "status"),
    ):
        with pytest.raises(Unavailable, match="refuse the certificate"):
            await getattr(stub, call)()
        await stub.close()


@dataclass
class Asking:
    """Asks by REST and by the SDK, each time on a new connection as well, without repeating anything."""

    cluster: LocalCluster
    own: Path
    rounds: int = 0
    is_over: bool = False
    kept: TlsIdentity = field(init=False)
    """Of the connection that is kept."""

    def __post_init__(self) -> None:
        self.kept = identities.identity(self.own)

    async def run(self) -> None:
        once = RetryPolicy(max_attempts=1)
        async with (
            rest(self.cluster.url) as client,
            AsyncClient(self.cluster.router_target, tls=self.kept, retry=once) as sdk,
        ):
            while not self.is_over:
                assert text_of(await post(client, TWO.body()))
                assert (await sdk.chat(TWO.text, [DIGITS / "3_a.png"], temperature=0, max_tokens=2)).text
                tls = identities.identity(self.own)
                async with AsyncClient(self.cluster.router_target, tls=tls, retry=once) as fresh:
                    await fresh.models()
                self.rounds += 1
                await asyncio.sleep(0.05)


async def replaced(cluster: LocalCluster, asking: Sequence[Asking], replace: Callable[[], None]) -> None:
    """Replace files, until all processes use the new ones, and each has asked with them."""

    def used() -> dict[str, int]:
        """How often each process has taken new files into use."""
        return {path.stem: path.read_text().count("new TLS files are in use") for path in cluster.log_dir.glob("*.log")}

    before, kept = used(), [client.kept.current for client in asking]
    assert before.keys() == cluster.processes.keys()
    replace()
    async with asyncio.timeout(USED_WITHIN_S):
        while any(times == before[name] for name, times in used().items()):  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.05)
        while any(client.kept.current == last for client, last in zip(asking, kept, strict=True)):  # noqa: ASYNC110 - by its clock
            await asyncio.sleep(0.05)
    wanted = [client.rounds + 2 for client in asking]  # the round that runs began before
    while any(client.rounds < rounds for client, rounds in zip(asking, wanted, strict=True)):  # noqa: ASYNC110 - other processes
        await asyncio.sleep(0.05)
