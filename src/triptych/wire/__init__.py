"""Converts between domain types and messages (``triptych.v1``), and between errors and gRPC statuses.

Requests are untrusted: ``decode`` parses them and ``bounds`` declares the limits of each field, so that domain objects
are made from valid messages only. ``flat`` derives the conversion where a dataclass and a message have equal fields.
"""
