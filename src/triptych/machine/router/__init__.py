"""Memory of the router."""
