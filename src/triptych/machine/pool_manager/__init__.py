"""State of the pool manager."""
