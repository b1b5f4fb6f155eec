"""The gateway: OpenAI-compatible REST in front of the router."""
