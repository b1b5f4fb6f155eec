"""State machines of the router."""
