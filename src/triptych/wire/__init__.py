"""The wire contract (``triptych.v1``) to the domain and back, by service, and errors to statuses and back.

Requests are not trusted: ``decode`` parses their bytes and ``bounds`` declares what each field may be, so that domain objects
are made of valid messages only. ``flat`` derives the conversions where a dataclass and a message have the same fields.
"""
