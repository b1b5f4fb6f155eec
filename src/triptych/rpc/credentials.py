"""gRPC credentials from a process's TLS identity."""

import grpc

from triptych.runtime.tls import TlsIdentity, TlsMaterial


def server_credentials(tls: TlsIdentity) -> grpc.ServerCredentials:
    """Requires client certificates. New connections use the files that are there."""
    used = tls.current

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if (material := tls.current) is used:
            return None
        used = material
        return _configuration(material)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        changed,  # type: ignore[arg-type]  # None means "as before", which the stub forgets
        require_client_authentication=True,
    )


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.authority)


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(material.authority, material.key, material.certificate)
