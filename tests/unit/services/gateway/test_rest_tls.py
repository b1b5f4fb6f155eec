"""The REST port under TLS."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import uvloop

from tests import identities
from tests.unit.services.gateway.fakes import FakeRouter
from triptych.runtime.process import CannotStart
from triptych.runtime.settings import SettingsError
from triptych.runtime.telemetry import Telemetry
from triptych.services.gateway.app import serve
from triptych.services.gateway.http import SPARE_CONNECTIONS
from triptych.services.gateway.keys import new_key
from triptych.services.gateway.settings import GatewaySettings, RestTls


def client(port: int, trusted: Path, key: str = "") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    context = ssl.create_default_context(cafile=str(trusted))
    return httpx.AsyncClient(
        base_url=f"https://localhost:{port}", verify=context, trust_env=False, timeout=60, headers=headers
    )


async def test_https_with_keys_and_without_certificates_of_callers(tmp_path: Path) -> None:
    made = identities.cluster(tmp_path / "ca")
    certificate, private, trusted = identities.files(made.folder / "gateway")
    key, lines = new_key("alice")
    (tmp_path / "keys.toml").write_text(lines)
    telemetry = Telemetry()
    settings = GatewaySettings(port=0, keys=tmp_path / "keys.toml", rest_tls=RestTls(certificate, private))
    async with serve(settings, FakeRouter(), telemetry) as app:
        async with client(app.port, trusted, key) as known, client(app.port, trusted) as unknown:
            assert (await known.get("/v1/models")).status_code == 200
            assert (await unknown.get("/v1/models")).status_code == 401
        async with httpx.AsyncClient(trust_env=False, timeout=60) as plain:
            with pytest.raises(httpx.HTTPError):
                await plain.get(f"http://127.0.0.1:{app.port}/health")
        stranger = identities.authority(tmp_path / "stranger")
        async with client(app.port, stranger.folder / "ca.pem") as distrusting:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await distrusting.get("/health")
    assert b'triptych_tls_certificate_expiry_timestamp_seconds{certificate="rest"}' in telemetry.metrics.render()


@pytest.mark.slow
def test_clients_that_send_nothing_do_not_hold_up_the_end(tmp_path: Path) -> None:
    """One has made its handshake and is idle, as in a pool of connections; the others have not begun theirs."""
    certificate, private, trusted = identities.files(identities.cluster(tmp_path / "ca").folder / "gateway")
    context = ssl.create_default_context(cafile=str(trusted))

    async def scenario() -> None:
        settings = GatewaySettings(port=0, drain_s=40, rest_tls=RestTls(certificate, private))
        async with serve(settings, FakeRouter()) as app:
            address = ("127.0.0.1", app.port)
            idle = socket.create_connection(address)
            async with asyncio.TaskGroup() as group:
                wrapping = group.create_task(asyncio.to_thread(context.wrap_socket, idle, server_hostname="localhost"))
                await asyncio.sleep(0)
                silent = [socket.create_connection(address) for _ in range(100)]
            began_s = asyncio.get_running_loop().time()
            await app.drain()
            took_s = asyncio.get_running_loop().time() - began_s
            for client in (wrapping.result(), *silent):
                client.close()
        assert took_s < 25, "uvloop waits 30 s for a close_notify, 60 s for a handshake"

    uvloop.run(scenario())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_handshakes_that_do_not_go_on_are_bounded_in_number_and_time(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    certificate, private, trusted = identities.files(identities.cluster(tmp_path / "ca").folder / "gateway")

    async def scenario(head_timeout_s: int, clients: int, ended: int) -> None:
        """The oldest of the clients that only connect are cut off, while another gets its answer."""
        tls = RestTls(certificate, private)
        settings = GatewaySettings(port=0, max_connections=1, head_timeout_s=head_timeout_s, rest_tls=tls)
        async with serve(settings, FakeRouter()) as app, asyncio.timeout(60):
            silent = [await asyncio.open_connection("127.0.0.1", app.port) for _ in range(clients)]
            async with client(app.port, trusted) as http:
                assert (await http.get("/v1/models")).status_code == 200
            for reader, _ in silent[:ended]:
                assert await reader.read() == b""
            assert not any(reader.at_eof() for reader, _ in silent[ended:])
            for _, writer in silent:
                writer.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario(1, 3, 3))  # a handshake has the time of a head
        runner.run(scenario(3600, SPARE_CONNECTIONS + 4, 4))  # one too many ends the oldest


async def test_files_that_cannot_be_used_stop_the_start(tmp_path: Path) -> None:
    settings = GatewaySettings(port=0, rest_tls=RestTls(tmp_path / "cert.pem", tmp_path / "key.pem"))
    with pytest.raises(CannotStart, match="does not exist"):
        async with serve(settings, FakeRouter()):
            pass
    with pytest.raises(SettingsError, match="need each other"):
        GatewaySettings.load(["--rest-tls-cert", "cert.pem"], {})


def test_an_admin_port_beyond_loopback_is_a_setting() -> None:
    open_port = ["--admin-host", "0.0.0.0", "--admin-port", "9100"]
    with pytest.raises(SettingsError, match="--allow-admin-network"):
        GatewaySettings.load(open_port, {})
    assert GatewaySettings.load([*open_port, "--allow-admin-network"], {}).admin_host == "0.0.0.0"
    GatewaySettings.load(open_port[:2], {})
