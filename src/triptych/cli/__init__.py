"""The ``triptych`` command."""
