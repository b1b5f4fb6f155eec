"""gRPC credentials from a process's TLS identity."""

import grpc

from triptych.runtime.tls import TlsIdentity, TlsMaterial


def server_credentials(tls: TlsIdentity) -> grpc.ServerCredentials:
    """Requires client certificates. New connections use the files that are there.

    Each connection gets a configuration of its own, and so keys for session tickets that no other has: gRPC has no option
    that turns tickets off, and with one of theirs callers get in for two days after their certificate has expired.
    """
    return grpc.dynamic_ssl_server_credentials(
        _configuration(tls.current), lambda: _configuration(tls.current), require_client_authentication=True
    )


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.authority)


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(material.authority, material.key, material.certificate)
