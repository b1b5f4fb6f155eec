"""gRPC plumbing: server, channels, interceptors, and stubs that satisfy ports.py."""
