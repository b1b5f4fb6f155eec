"""Certificates for tests, as ``triptych certs`` makes them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from triptych.cli.authority import CERTIFICATE, KEY, TRUSTED, Authority, Issued, Wanted, expected
from triptych.runtime.tls import TlsIdentity

DOMAIN = "triptych.test"
_DAY = timedelta(days=1)


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def authority(folder: Path, lifetime: timedelta = _DAY) -> Authority:
    folder.mkdir(exist_ok=True)
    return Authority.create(folder, lifetime, now())


def cluster(folder: Path, *users: str) -> Authority:
    """All identities of a cluster, and a user."""
    made = authority(folder)
    for wanted in expected(DOMAIN, (), users or ("user",)):
        made.issue(wanted, _DAY, now())
    return made


def issue(made: Authority, name: str, *names: str, serves: bool = True, lifetime: timedelta = _DAY) -> Path:
    made.issue(Wanted(name, names, serves), lifetime, now())
    return made.folder / name


def files(folder: Path) -> tuple[Path, Path, Path]:
    return folder / CERTIFICATE, folder / KEY, folder / TRUSTED


def identity(folder: Path, name: str = DOMAIN) -> TlsIdentity:
    return TlsIdentity.load(*files(folder), name=name)


def flags(folder: Path, name: str = DOMAIN) -> tuple[str, ...]:
    certificate, key, trusted = map(str, files(folder))
    return "--tls-cert", certificate, "--tls-key", key, "--tls-ca", trusted, "--tls-name", name


def names(folder: Path) -> tuple[tuple[str, ...], bool]:
    """The names in a certificate, and whether it is for servers as well."""
    found = Issued.read(folder)
    assert found is not None
    return found.wanted.names, found.wanted.serves
