"""State machines of an encoder."""
