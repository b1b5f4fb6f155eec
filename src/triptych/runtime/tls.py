"""Who this process is to others, and whom it believes: mutual TLS between services, from files in PEM."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """Both ends of every connection show a certificate that ``authority`` has signed.

    Who connects also checks that the certificate names the host that was asked for.
    """

    certificate: bytes
    """With what leads to the authority, if anything."""
    key: bytes
    authority: bytes
    listener: ssl.SSLContext
    caller: ssl.SSLContext

    @classmethod
    def load(cls, certificate: Path, key: Path, authority: Path) -> Self:
        """Raises ValueError when a file cannot be read, or key and certificate are not of one another."""
        try:
            listener = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority))
            listener.verify_mode = ssl.CERT_REQUIRED
            caller = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(authority))
            for context in (listener, caller):
                context.minimum_version = ssl.TLSVersion.TLSv1_2
                context.load_cert_chain(str(certificate), str(key))
            return cls(certificate.read_bytes(), key.read_bytes(), authority.read_bytes(), listener, caller)
        except ssl.SSLError as error:
            raise ValueError(f"the TLS files are of no use: {error.reason or 'not PEM'}") from None
        except OSError as error:
            name = error.filename or f"{certificate}, {key} or {authority}"
            raise ValueError(f"a TLS file cannot be read: {name} ({error.strerror})") from None
