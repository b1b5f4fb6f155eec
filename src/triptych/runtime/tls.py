"""Mutual TLS between services, from PEM files."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """Both ends of a connection present a certificate signed by ``authority``.

    The client also checks that the certificate names the host it connects to.
    """

    certificate: bytes
    """Including intermediate certificates, if any."""
    key: bytes
    authority: bytes
    listener: ssl.SSLContext
    caller: ssl.SSLContext

    @classmethod
    def load(cls, certificate: Path, key: Path, authority: Path) -> Self:
        """Raises ValueError when a file cannot be read, or key and certificate do not match."""
        try:
            listener = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority))
            listener.verify_mode = ssl.CERT_REQUIRED
            caller = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(authority))
            for context in (listener, caller):
                context.minimum_version = ssl.TLSVersion.TLSv1_2
                context.load_cert_chain(str(certificate), str(key))
            return cls(certificate.read_bytes(), key.read_bytes(), authority.read_bytes(), listener, caller)
        except ssl.SSLError as error:
            raise ValueError(f"the TLS files cannot be used: {error.reason or 'not PEM'}") from None
        except OSError as error:
            name = error.filename or f"{certificate}, {key} or {authority}"
            raise ValueError(f"a TLS file cannot be read: {name} ({error.strerror})") from None
