"""Memory of an encoder."""
