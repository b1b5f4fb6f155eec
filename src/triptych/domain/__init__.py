"""Domain types: frozen dataclasses and enums. Imports nothing else of triptych."""
