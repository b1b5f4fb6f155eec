"""The REST port under TLS."""

import ssl
from pathlib import Path

import httpx
import pytest

from services.gateway.app import serve
from services.gateway.keys import new_key
from services.gateway.settings import GatewaySettings, RestTls
from tests import identities
from tests.unit.services.gateway.fakes import FakeRouter
from triptych.runtime.process import CannotStart
from triptych.runtime.settings import SettingsError
from triptych.runtime.telemetry import Telemetry


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
