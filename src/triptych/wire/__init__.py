"""The wire contract (``triptych.v1``) to the domain and back, by service, and errors to statuses and back.

What comes in is not trusted: an enum that is not set, a digest of another length or a shape out of bounds is refused
with InvalidRequest, so that behind this package only well-formed domain objects exist.
"""
