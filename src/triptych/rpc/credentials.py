"""gRPC credentials from a process's TLS identity."""

from typing import Any

import grpc

from triptych.ports import Clock
from triptych.runtime.clock import monotonic
from triptych.runtime.tls import TlsIdentity, TlsMaterial

TICKETS_S = 600.0
"""Time for which a session ticket is good, seconds."""


def server_credentials(tls: TlsIdentity, *, clock: Clock = monotonic) -> grpc.ServerCredentials:
    """Requires client certificates. New connections use the files that are there."""
    configurations = Configurations(tls, clock)
    changed: Any = configurations.changed  # the types of gRPC lack the None that it takes
    return grpc.dynamic_ssl_server_credentials(configurations.first, changed, require_client_authentication=True)


class Configurations:
    """Configurations that a server's new connections use.

    gRPC (1.85) has no option that turns session tickets off. With one a caller gets in for two days after its
    certificate has expired. Tickets are good with one configuration only, so there is a new one every ``TICKETS_S``.

    A new one for each connection would not do. gRPC frees the last one while another connection that begins at the same
    time may be about to use it, which ends the process.
    """

    def __init__(self, tls: TlsIdentity, clock: Clock) -> None:
        self._tls = tls
        self._clock = clock
        self._material = tls.current
        self._until_s = clock() + TICKETS_S

    @property
    def first(self) -> grpc.ServerCertificateConfiguration:
        return _configuration(self._material)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC for each connection, one at a time. None keeps the last one."""
        material, now_s = self._tls.current, self._clock()
        if material is self._material and now_s < self._until_s:
            return None
        self._material, self._until_s = material, now_s + TICKETS_S
        return _configuration(material)


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.authority)


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(material.authority, material.key, material.certificate)
