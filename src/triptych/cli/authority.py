"""A local authority: the files of ``triptych certs``.

    DIR/ca.pem, ca.key              the authority, and what it signs with
    DIR/NAME/cert.pem, key.pem      an identity, with the authorities that it trusts beside it
    DIR/NAME/ca.pem

Each file is replaced as a whole. Private keys are readable by their owner only.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from triptych.cli.outcome import CliError
from triptych.files import BadFile, read_bytes
from triptych.runtime import tls

CERTIFICATE, KEY, TRUSTED = "cert.pem", "key.pem", "ca.pem"
_AUTHORITY_KEY = "ca.key"
_MAX_PEM_NBYTES = 1 << 20
_CLOCK_SKEW = timedelta(hours=1)
"""Certificates are valid from this long ago, for machines whose clocks are behind."""
_HOST = re.compile(r"(?=.{1,253}$)(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", re.ASCII)
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Wanted:
    """An identity: its folder, and the names in its certificate: domain names and IP addresses."""

    folder: str
    names: tuple[str, ...] = ()
    serves: bool = True
    """False: it is accepted from callers, and nowhere that is called."""

    def __post_init__(self) -> None:
        if not _FOLDER.fullmatch(self.folder):
            raise CliError(f"{self.folder!r} is no name of a folder: letters, digits, '.', '_' and '-'", caller=True)
        for name in self.names:
            _general_name(name)


@dataclass(frozen=True, slots=True)
class Issued:
    """An identity that is there."""

    wanted: Wanted
    ends: datetime
    issuer: x509.Name

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read an identity from its folder; None if there is none. Raises CliError for half of one."""
        present = [name for name in (CERTIFICATE, KEY) if (folder / name).exists()]
        if not present:
            return None
        certificate = _certificates(folder / CERTIFICATE)[0]
        if _loaded_key(folder / KEY).public_key() != certificate.public_key():
            raise CliError(f"{folder / KEY} is not the key of {folder / CERTIFICATE}", caller=True)
        names: tuple[str, ...] = ()
        with contextlib.suppress(x509.ExtensionNotFound):
            named = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            names = tuple(str(name.value) for name in named)
        serves = True  # as one without extended key usages does, if another tool made it
        with contextlib.suppress(x509.ExtensionNotFound):
            usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
            serves = ExtendedKeyUsageOID.SERVER_AUTH in usages
        wanted = Wanted(folder.name, names, serves=serves)
        return cls(wanted, certificate.not_valid_after_utc, certificate.issuer)


class Authority:
    """The authority in ``folder``. ``trusted`` are its certificates, the one that signs first."""

    def __init__(self, folder: Path, key: ec.EllipticCurvePrivateKey, trusted: Sequence[x509.Certificate]) -> None:
        """Use ``made`` or ``found``."""
        self.folder = folder
        self.trusted = tuple(trusted)
        self._key = key

    @property
    def ends(self) -> datetime:
        return self.trusted[0].not_valid_after_utc

    @classmethod
    def create(
        cls, folder: Path, lifetime: timedelta, now: datetime, *, beside: Sequence[x509.Certificate] = ()
    ) -> Self:
        """A new one that replaces what is in ``folder``; those in ``beside`` are still trusted."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _called(f"triptych authority {os.urandom(4).hex()}")  # unlike that of others, which tells them apart
        certificate = (
            _builder(subject, subject, key, now, now + lifetime)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        authority = cls(folder, key, (certificate, *beside))
        _write(
            folder / TRUSTED, authority.trusted_pem
        )  # first, so that the old key still has its certificate if this ends here
        _write(folder / _AUTHORITY_KEY, _private_pem(key), private=True)
        return authority

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The one that is there; None if there is none. Raises CliError for half of one."""
        key_file, file = folder / _AUTHORITY_KEY, folder / TRUSTED
        if not key_file.exists() and not file.exists():
            return None
        trusted = _certificates(file)
        key = _loaded_key(key_file)
        signing = [certificate for certificate in trusted if certificate.public_key() == key.public_key()]
        if not signing:
            raise CliError(f"{key_file} is not the key of a certificate in {file}", caller=True)
        return cls(folder, key, (*signing, *(certificate for certificate in trusted if certificate not in signing)))

    @property
    def trusted_pem(self) -> bytes:
        return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in self.trusted)

    def trust_only_itself(self, issued: Iterable[Issued]) -> None:
        """Forget authorities that it replaced. Raises CliError if some of ``issued`` need them."""
        older = [identity.wanted.folder for identity in issued if identity.issuer != self.trusted[0].subject]
        if older:
            raise CliError(f"an older authority signed {', '.join(older)}: use --renew first", caller=True)
        self.trusted = self.trusted[:1]
        _write(self.folder / TRUSTED, self.trusted_pem)

    def share(self, folder: str) -> bool:
        """Put the trusted authorities beside an identity. Returns whether they were others."""
        file = self.folder / folder / TRUSTED
        if file.is_file() and file.read_bytes() == self.trusted_pem:
            return False
        _write(file, self.trusted_pem)
        return True

    def issue(self, wanted: Wanted, lifetime: timedelta, now: datetime) -> datetime:
        """Write an identity with a new key, and return when it expires: not after the authority."""
        if self.ends <= now:
            raise CliError(f"the authority in {self.folder} expired: use --new-authority", caller=True)
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if wanted.serves else [])]
        signer = self.trusted[0]
        ends = min(now + lifetime, self.ends)
        builder = (
            _builder(_called(wanted.folder), signer.subject, key, now, ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if wanted.names:
            names = x509.SubjectAlternativeName(map(_general_name, wanted.names))
            builder = builder.add_extension(names, critical=False)
        folder = self.folder / wanted.folder
        self.share(wanted.folder)
        _write(folder / KEY, _private_pem(key), private=True)
        _write(folder / CERTIFICATE, builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return ends


def identities(folder: Path) -> tuple[Issued, ...]:
    """All identities in ``folder``."""
    identities_found = (Issued.read(path) for path in sorted(folder.iterdir()) if path.is_dir())
    return tuple(identity for identity in identities_found if identity is not None)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        if not _HOST.fullmatch(name):
            raise CliError(f"{name!r} is neither a domain name in lower case nor an IP address", caller=True) from None
    return x509.DNSName(name)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _certificates(file: Path) -> Sequence[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read(file))
    except ValueError:
        raise CliError(f"{file} has no certificate (PEM)", caller=True) from None


def _loaded_key(file: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(_read(file), password=None)
    except (ValueError, TypeError):
        raise CliError(f"{file} has no private key (PEM, without a password)", caller=True) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CliError(f"{file} has no key of an elliptic curve", caller=True)
    return key


def _read(file: Path) -> bytes:
    try:
        return read_bytes(file, _MAX_PEM_NBYTES)
    except BadFile as error:
        raise CliError(f"{file} {error}", caller=True) from None


def _write(file: Path, data: bytes, *, private: bool = False) -> None:
    """Readers see the old content or the new, also after a crash. An OSError names a file."""
    file.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(descriptor, 0o600 if private else 0o644)
            stream.write(data)
            stream.flush()
            os.fsync(descriptor)
        Path(name).replace(file)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # as when the disk is full
            error.filename = str(file)
        raise


def expected(domain: str, hosts: Iterable[tuple[str, str]], users: Sequence[str]) -> tuple[Wanted, ...]:
    """The identities of a cluster, and those of an operator and ``users``, who serve nothing. ``hosts`` are further names of
    single ones, by folder. Raises CliError.
    """
    kinds = {
        "gateway": tls.GATEWAY,
        "router": tls.ROUTER,
        "pool-manager": tls.POOL_MANAGER,
        "encoder": tls.INSTANCE,
        "text": tls.INSTANCE,
        "scaler": tls.SCALER,
        "redis": tls.REDIS,
    }
    names = {folder: [f"{kind}.{domain}"] for folder, kind in kinds.items()}
    names["gateway"] += ["localhost", "127.0.0.1", "::1"]  # people call its REST port by these
    for folder, host in hosts:
        if folder not in names:
            raise CliError(f"--host {folder}={host}: {folder} is none of {', '.join(names)}", caller=True)
        if host not in names[folder]:
            names[folder].append(host)
    names[tls.OPERATOR] = [f"{tls.OPERATOR}.{domain}"]
    for user in users:
        if user in names:
            raise CliError(f"--user {user} has the name of a service", caller=True)
    services = (Wanted(folder, tuple(known), serves=folder != tls.OPERATOR) for folder, known in names.items())
    return (*services, *(Wanted(user, serves=False) for user in users))
