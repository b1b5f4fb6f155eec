"""One process for many: an event loop with virtual time, threads that spend it, and links in place of gRPC."""
