"""Identities that follow their files, and what is told of them."""

import asyncio
import logging
import os
import ssl
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes

from tests import identities
from triptych.cli.authority import Authority
from triptych.runtime.metrics import Metrics
from triptych.runtime.tls import Reloaded, ServerCertificate, TlsIdentity, TlsSettings, Validity, caller_of
from triptych.runtime.tls_expiry import TlsExpiry


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = identities.authority(tmp_path / "ca")
    identities.issue(made, "router", f"router.{identities.DOMAIN}")
    return made


def load(made: Authority, clock: Clock, name: str = "router") -> TlsIdentity:
    return TlsIdentity.load(*identities.files(made.folder / name), name=identities.DOMAIN, clock=clock)


def test_new_files_are_used_a_second_later(authority: Authority, clock: Clock) -> None:
    own = load(authority, clock)
    first = own.current
    identities.issue(authority, "router", f"router.{identities.DOMAIN}")
    assert own.current is first
    clock.now_s += 1.1
    second = own.current
    assert second.certificate == (authority.folder / "router" / "cert.pem").read_bytes() != first.certificate
    clock.now_s += 1.1
    assert own.current is second


def test_files_may_be_named_by_strings(authority: Authority) -> None:
    files = identities.files(authority.folder / "router")
    assert TlsIdentity.load(*map(str, files)).current == TlsIdentity.load(*files).current


def test_files_that_are_replaced_while_they_are_first_read_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")

    def read() -> str:
        content = file.read_text()
        if content == "old":
            file.write_text("newer")
        return content

    assert Reloaded([file], read).current == "newer"


def test_files_that_are_only_touched_change_nothing(authority: Authority, clock: Clock) -> None:
    own = load(authority, clock)
    first = own.current
    os.utime(authority.folder / "router" / "cert.pem", (0, 0))
    clock.now_s += 1.1
    assert own.current is first


@pytest.mark.parametrize("broken", ["half", "of another key", "expired", "missing", "empty", "endless"])
def test_files_that_cannot_be_used_leave_the_last_ones_until_they_can(
    authority: Authority, clock: Clock, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    own = load(authority, clock)
    first = own.current
    folder = authority.folder / "router"
    match broken:
        case "half":
            (folder / "cert.pem").write_bytes(first.certificate[:300])
        case "of another key":
            other = identities.issue(authority, "other", "a")
            (folder / "key.pem").write_bytes((other / "key.pem").read_bytes())
        case "expired":
            identities.issue(authority, "router", "a", lifetime=-timedelta(minutes=1))
        case "missing":
            (folder / "key.pem").unlink()
        case "endless":
            os.truncate(folder / "cert.pem", 1 << 40)
        case _:
            (folder / "ca.pem").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            clock.now_s += 1.1
            assert own.current is first
    assert [record.message[:31] for record in caplog.records] == ["new TLS files are not used yet:"]
    identities.issue(authority, "router", f"router.{identities.DOMAIN}")
    authority.share("router")
    clock.now_s += 1.1
    assert own.current.certificate == (folder / "cert.pem").read_bytes() != first.certificate


@pytest.mark.parametrize(
    ("lifetime", "message"),
    [(-timedelta(minutes=1), "certificate has expired"), (timedelta(days=1), "")],
)
def test_an_expired_certificate_is_refused_at_the_start(
    authority: Authority, lifetime: timedelta, message: str
) -> None:
    folder = identities.issue(authority, "router", "router.a", lifetime=lifetime)
    if not message:
        assert "PRIVATE" not in repr(identities.identity(folder).current)
        return
    with pytest.raises(ValueError, match=message):
        identities.identity(folder)
    with pytest.raises(ValueError, match=message):
        ServerCertificate(folder / "cert.pem", folder / "key.pem")


def test_the_key_of_another_certificate_is_refused_at_the_start(authority: Authority) -> None:
    certificate, _, trusted = identities.files(authority.folder / "router")
    other = identities.issue(authority, "other", "a")
    with pytest.raises(ValueError, match="cannot be used: KEY_VALUES_MISMATCH"):
        TlsIdentity.load(certificate, other / "key.pem", trusted)


@pytest.mark.parametrize(
    ("key", "taken"),
    [
        (ec.generate_private_key(ec.SECP256R1()), True),
        (ec.generate_private_key(ec.SECP384R1()), True),
        (rsa.generate_private_key(65537, 2048), True),
        (ec.generate_private_key(ec.SECP521R1()), False),
        (ed25519.Ed25519PrivateKey.generate(), False),
    ],
    ids=["P-256", "P-384", "RSA", "P-521", "Ed25519"],
)
def test_a_key_that_grpc_cannot_use_is_refused(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, key: CertificateIssuerPrivateKeyTypes, taken: bool
) -> None:
    """OpenSSL takes it, so the process would use it, and its peers would refuse each new connection."""
    monkeypatch.setattr(ec, "generate_private_key", lambda *_: key)
    files = identities.files(identities.issue(authority, "other", "other.a"))
    ServerCertificate(*files[:2])
    if taken:
        TlsIdentity.load(*files)
        return
    with pytest.raises(ValueError, match="neither RSA nor ECDSA with P-256 or P-384"):
        TlsIdentity.load(*files)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(authority: Authority, clock: Clock) -> None:
    certificate, key, trusted = identities.files(authority.folder / "router")
    own = load(authority, clock)
    first = own.current
    plain = serialization.load_pem_private_key(key.read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    key.write_bytes(plain.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret))
    for load_it in (
        lambda: TlsIdentity.load(certificate, key, trusted),
        lambda: ServerCertificate(certificate, key),
        lambda: caller_of(trusted, certificate, key),
    ):
        with pytest.raises(ValueError, match="the TLS key needs a password"):
            load_it()
    clock.now_s += 1.1
    assert own.current is first


async def test_a_listener_admits_kinds_by_the_names_in_their_certificates(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    own = load(authority, Clock())
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=own.listening("instance"))
    port = server.sockets[0].getsockname()[1]
    async with server:
        for names, heard in (
            ((f"instance.{identities.DOMAIN}",), b"hello"),
            ((f"*.{identities.DOMAIN}",), b"hello"),
            ((f"router.{identities.DOMAIN}", "127.0.0.1"), b""),
            ((), b""),
        ):
            caller = identities.identity(identities.issue(authority, "caller", *names, serves=False))
            assert await ask(port, caller) == heard
    assert "a TLS connection was refused: the caller's certificate is not for a kind that may call" in caplog.text
    anyone = TlsIdentity.load(*identities.files(authority.folder / "router"))
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=anyone.listening("instance"))
    async with server:
        assert await ask(server.sockets[0].getsockname()[1], own) == b"hello"


def test_a_server_certificate_needs_no_authority_and_one_for_callers_serves_nobody(authority: Authority) -> None:
    certificate, key, trusted = identities.files(authority.folder / "router")
    assert ServerCertificate(certificate, key).validity.ends_s > 0
    user = identities.issue(authority, "user", serves=False)
    with pytest.raises(ValueError, match="purpose"):
        ServerCertificate(user / "cert.pem", user / "key.pem")
    caller_of(trusted, None, None)
    with pytest.raises(ValueError, match="does not exist"):
        caller_of(trusted.with_name("absent"), None, None)


def test_settings_say_what_is_missing_or_wrong() -> None:
    for key in (None, Path("b")):
        with pytest.raises(ValueError, match="TLS needs tls_cert, tls_key and tls_ca"):
            TlsSettings(Path("a"), key)
    with pytest.raises(ValueError, match="tls_name alone"):
        TlsSettings(tls_name="a.b")
    with pytest.raises(ValueError, match="no domain name"):
        TlsSettings(Path("a"), Path("b"), Path("c"), "A_B")


async def test_a_listener_refuses_by_its_newest_authority_and_says_why_at_a_bounded_rate(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    own = load(authority, clock)
    stranger = identities.authority(tmp_path / "stranger")
    outside = identities.identity(identities.issue(stranger, "user", serves=False))
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=own.listening())
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await ask(port, identities.identity(authority.folder / "router")) == b"hello"
        trusting = ssl.create_default_context(cafile=str(authority.folder / "ca.pem"))
        with caplog.at_level(logging.WARNING):
            for _ in range(5):
                assert await ask(port, trusting) == b""
        lines = [record.message for record in caplog.records if record.name == "triptych.runtime.tls"]
        assert lines == ["a TLS connection was refused: PEER_DID_NOT_RETURN_A_CERTIFICATE"]
        # The whole authority is replaced: who was trusted is not any more, and the other way round.
        new = identities.authority(authority.folder)
        identities.issue(new, "router", f"router.{identities.DOMAIN}")
        clock.now_s += 1.1
        assert await ask(port, identities.identity(new.folder / "router")) == b"hello"
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(port, outside)


async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    writer.close()


async def ask(port: int, caller: TlsIdentity | ssl.SSLContext) -> bytes:
    """What the server says; nothing if it hangs up."""
    context = caller if isinstance(caller, ssl.SSLContext) else caller.calling("router")
    host = identities.DOMAIN if isinstance(caller, TlsIdentity) else f"router.{identities.DOMAIN}"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=host)
    try:
        return await reader.read()
    except (ssl.SSLError, ConnectionError):
        return b""
    finally:
        writer.close()


def test_warnings_come_in_time_and_ever_closer_and_then_an_error(caplog: pytest.LogCaptureFixture) -> None:
    clock, metrics = Clock(), Metrics()
    validity = Validity(0.0, 1000 * 3600.0)
    expiry = TlsExpiry(metrics, clock=clock)
    assert b"triptych_tls" not in metrics.render()
    expiry.watch("services", lambda: validity)
    lines = []
    with caplog.at_level(logging.WARNING):
        for hour in range(1003):
            clock.now_s = hour * 3600.0
            caplog.clear()
            expiry.look()
            lines += [(hour, record.levelname) for record in caplog.records]
        assert [hour for hour, _ in lines] == [800, 900, 950, 975, 988, 994, 997, 999, 1000]
        assert [level for _, level in lines] == ["WARNING"] * 8 + ["ERROR"]
        caplog.clear()
        validity = Validity(clock.now_s, clock.now_s + 3600.0)
        expiry.look()
        assert not caplog.records
    (shown,) = (line for line in metrics.render().decode().splitlines() if 'certificate="services"' in line)
    assert float(shown.split()[-1]) == validity.ends_s
