"""gRPC credentials from a process's TLS identity."""

import grpc

from triptych.runtime.tls import TlsIdentity


def server_credentials(tls: TlsIdentity) -> grpc.ServerCredentials:
    """Requires client certificates."""
    return grpc.ssl_server_credentials([(tls.key, tls.certificate)], tls.authority, require_client_auth=True)


def channel_credentials(tls: TlsIdentity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
