"""The TLS of gRPC servers."""

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from tests import identities
from triptych.rpc.credentials import TICKETS_S, Configurations
from triptych.rpc.server import RpcServer
from triptych.runtime.tls import TlsIdentity

HOST = "127.0.0.1"


def test_connections_share_a_configuration_until_its_tickets_end_or_files_change(tmp_path: Path) -> None:
    """A new one while several connections begin may crash gRPC, so it must be rare."""
    made = identities.cluster(tmp_path / "ca")
    now_s = [0.0]
    tls = TlsIdentity.load(*identities.files(made.folder / "encoder"), clock=lambda: now_s[0])
    configurations = Configurations(tls, clock=lambda: now_s[0])
    assert configurations.changed() is None
    now_s[0] = TICKETS_S - 1
    assert configurations.changed() is None
    now_s[0] = TICKETS_S
    assert configurations.changed() is not None
    assert configurations.changed() is None
    identities.issue(made, "encoder", f"instance.{identities.DOMAIN}", serves=True)
    now_s[0] += 2
    assert configurations.changed() is not None
    assert configurations.changed() is None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_is_resumed_with_the_configuration_that_it_began_with_only(
    tmp_path: Path, version: ssl.TLSVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session would outlive the certificate that it began with: nobody looks at that again."""
    monkeypatch.setattr("triptych.rpc.credentials.TICKETS_S", 0.0)
    made = identities.cluster(tmp_path / "ca")
    context = ssl.create_default_context(cafile=str(made.folder / "ca.pem"))
    context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(made.folder / "user" / "cert.pem", made.folder / "user" / "key.pem")
    tls = identities.identity(made.folder / "encoder")
    async with RpcServer(host=HOST, port=0, service_names=(), register=lambda _: None, tls=tls) as server:
        session, _ = await asyncio.to_thread(greet, server.port, context)
        assert session is not None
        assert session.has_ticket
        _, resumed = await asyncio.to_thread(greet, server.port, context, session)
        assert not resumed


def greet(
    port: int, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLSession | None, bool]:
    """The session of a new connection that the server has answered, and whether it is the given one."""
    name = f"instance.{identities.DOMAIN}"
    with (
        socket.create_connection((HOST, port), 10) as plain,
        context.wrap_socket(plain, server_hostname=name, session=session) as connection,
    ):
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        assert connection.recv(64)
        return connection.session, bool(connection.session_reused)
