"""State machines without I/O. ``handle(event, now_s)`` is the only mutator and returns effects."""
