"""Open-loop load for any OpenAI endpoint: what is sent (``workload``, ``traces``), sending it, and what came of it."""
