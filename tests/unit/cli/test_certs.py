"""``triptych certs``: what it makes, keeps and refuses."""

import errno
import itertools
import os
import ssl
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.command_line import invoke
from triptych.runtime.tls import TlsIdentity

SERVICES = {
    "gateway": "gateway",
    "router": "router",
    "pool-manager": "pool-manager",
    "encoder": "instance",
    "text": "instance",
    "scaler": "scaler",
    "redis": "redis",
}


def certs(*arguments: object, status: int = 0) -> str:
    result = invoke(["certs", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


def certificate(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())


def names(folder: Path) -> list[str]:
    extension = certificate(folder).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(name.value) for name in extension.value]


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_service_gets_an_identity_for_its_kind_and_a_user_one_for_calls_only(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "certs"
    certs(folder, "--name", "a.test", "--user", "alice", "--host", "gateway=chat.example", "--host", "redis=10.0.0.9")
    for name, kind in SERVICES.items():
        assert names(folder / name)[0] == f"{kind}.a.test"
        TlsIdentity.load(*(folder / name / file for file in ("cert.pem", "key.pem", "ca.pem")), name="a.test")
    assert names(folder / "gateway")[1:] == ["localhost", "127.0.0.1", "::1", "chat.example"]
    assert names(folder / "redis") == ["redis.a.test", "10.0.0.9"]
    assert names(folder / "operator") == ["operator.a.test"]
    for caller in ("alice", "operator"):
        usages = certificate(folder / caller).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert list(usages) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not (folder / "user").exists()
    assert {file.name: mode(file) for file in folder.rglob("*.*") if file.is_file()} == {
        "ca.pem": 0o644,
        "ca.key": 0o600,
        "cert.pem": 0o644,
        "key.pem": 0o600,
    }
    assert {mode(path) for path in (folder, *folder.iterdir()) if path.is_dir()} == {0o700}


def test_what_is_there_is_kept_and_what_is_missing_is_made(tmp_path: Path) -> None:
    certs(tmp_path)
    before = content(tmp_path)
    assert "made" not in certs(tmp_path)
    assert content(tmp_path) == before
    output = certs(tmp_path, "--user", "bob")
    assert output.count("made") == 1
    assert {name: data for name, data in content(tmp_path).items() if not name.startswith("bob/")} == before


def test_renewing_replaces_keys_and_keeps_names(tmp_path: Path) -> None:
    certs(tmp_path, "--host", "router=r.example", "--days", 5)
    before = content(tmp_path)
    certs(tmp_path, "--renew-within", 4)
    assert content(tmp_path) == before
    certs(tmp_path, "--renew-within", 6, "--days", 20)
    after = content(tmp_path)
    assert {name for name in before if before[name] == after[name]} == {
        "ca.key",
        *(name for name in before if name.endswith("ca.pem")),
    }
    assert names(tmp_path / "router") == ["router.triptych.internal", "r.example"]
    certs(tmp_path, "--renew")
    assert content(tmp_path)["router/key.pem"] != after["router/key.pem"]


def test_an_authority_is_replaced_in_three_steps(tmp_path: Path) -> None:
    """At each step, whoever has read the step before trusts whoever has read this one."""
    certs(tmp_path)

    def trusts(ca: bytes, leaf: bytes) -> bool:
        authorities = x509.load_pem_x509_certificates(ca)
        return x509.load_pem_x509_certificate(leaf).issuer in [authority.subject for authority in authorities]

    steps = [content(tmp_path)]
    for flag in ("--new-authority", "--renew", "--drop-old-authorities"):
        certs(tmp_path, flag)
        steps.append(content(tmp_path))
    for earlier, later in itertools.pairwise(steps):
        assert trusts(earlier["router/ca.pem"], later["text/cert.pem"])
        assert trusts(later["router/ca.pem"], earlier["text/cert.pem"])
    assert not trusts(steps[-1]["router/ca.pem"], steps[0]["text/cert.pem"])
    assert len(x509.load_pem_x509_certificates(steps[-1]["router/ca.pem"])) == 1


def test_an_old_authority_that_is_needed_is_not_dropped(tmp_path: Path) -> None:
    certs(tmp_path)
    certs(tmp_path, "--new-authority")
    assert "use --renew first" in certs(tmp_path, "--drop-old-authorities", status=2)


def test_certificates_do_not_outlive_their_authority(tmp_path: Path) -> None:
    certs(tmp_path, "--authority-days", 3)
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    assert certificate(tmp_path / "router").not_valid_after_utc == authority.not_valid_after_utc


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--name", "No_Domain"), "no domain name in lower case"),
        (("--user", "router"), "name of a service"),
        (("--user", "../a"), "no name of a folder"),
        (("--host", "router"), "NAME=HOST"),
        (("--host", "nobody=a"), "none of gateway, router"),
        (("--host", "router=a b"), "neither a domain name"),
        (("--new-authority", "--renew"), "comes first"),
    ],
)
def test_mistakes_are_explained_and_write_nothing(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in certs(tmp_path / "certs", *arguments, status=2)
    assert not content(tmp_path)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("ca.key", "ca.key does not exist"),
        ("ca.pem", "ca.pem does not exist"),
        ("router/key.pem", "router/key.pem does not exist"),
        ("text/cert.pem", "text/cert.pem does not exist"),
    ],
)
def test_half_of_a_pair_is_an_error_and_overwrites_nothing(tmp_path: Path, missing: str, message: str) -> None:
    certs(tmp_path)
    (tmp_path / missing).unlink()
    before = content(tmp_path)
    assert message in certs(tmp_path, "--renew", status=2)
    assert content(tmp_path) == before


def test_a_full_disk_is_said_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    said = certs(tmp_path, status=1)
    assert said == f"triptych: cannot use {tmp_path}/ca.pem: No space left on device\n"
    assert not content(tmp_path)


def test_files_of_others_are_not_taken(tmp_path: Path) -> None:
    certs(tmp_path)
    (tmp_path / "router" / "key.pem").write_bytes((tmp_path / "text" / "key.pem").read_bytes())
    assert "is not the key of" in certs(tmp_path, status=2)
    (tmp_path / "router" / "key.pem").write_text("nothing")
    assert "has no private key" in certs(tmp_path, status=2)


def test_a_user_is_accepted_from_callers_only(tmp_path: Path) -> None:
    certs(tmp_path)
    user, router = (
        TlsIdentity.load(
            *(tmp_path / name / file for file in ("cert.pem", "key.pem", "ca.pem")), name="triptych.internal"
        )
        for name in ("user", "router")
    )
    shake(listener=router, caller=user)
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        shake(listener=user, caller=router)


def shake(*, listener: TlsIdentity, caller: TlsIdentity) -> None:
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        caller.calling("router").wrap_bio(back, there, server_hostname="127.0.0.1"),
        listener.listening().wrap_bio(there, back, server_side=True),
    )
    waiting = set(ends)
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
                waiting.discard(end)
            except ssl.SSLWantReadError:
                pass
    assert not waiting


@pytest.mark.slow
def test_a_certificate_of_another_tool_may_have_no_key_usages(tmp_path: Path) -> None:
    certs(tmp_path)
    folder = tmp_path / "other"
    folder.mkdir()
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-days", "1", "-newkey", "ec", "-pkeyopt"),
            *("ec_paramgen_curve:prime256v1", "-subj", "/CN=other", "-addext", "subjectAltName=DNS:a.host"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    assert "other (a.host)" in certs(tmp_path)
