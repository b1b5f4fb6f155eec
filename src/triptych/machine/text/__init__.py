"""Memory of a text instance."""
