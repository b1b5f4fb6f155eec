"""A certificate for the processes of a benchmark under mutual TLS."""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from triptych.cli.authority import CERTIFICATE, KEY, TRUSTED, Authority, Wanted
from triptych.runtime.tls import TlsIdentity

DOMAIN = "triptych.benchmark"
_LIFETIME = timedelta(days=1)


@contextlib.contextmanager
def certificate() -> Iterator[Path]:
    """The folder of one that fits every kind of service; it goes with the context."""
    with TemporaryDirectory(prefix="triptych-") as name:
        now = datetime.now(UTC).replace(microsecond=0)
        Authority.create(Path(name), _LIFETIME, now).issue(Wanted("own", (f"*.{DOMAIN}",)), _LIFETIME, now)
        yield Path(name) / "own"


def loaded(folder: Path) -> TlsIdentity:
    return TlsIdentity.load(folder / CERTIFICATE, folder / KEY, folder / TRUSTED, name=DOMAIN)


def flags(folder: Path) -> tuple[str, ...]:
    """What a service has to be started with."""
    files = {"cert": CERTIFICATE, "key": KEY, "ca": TRUSTED}
    return (
        *(part for name, file in files.items() for part in (f"--tls-{name}", str(folder / file))),
        "--tls-name",
        DOMAIN,
    )
