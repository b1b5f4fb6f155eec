"""State machines of a text instance."""
