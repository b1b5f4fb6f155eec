"""Nouns: frozen dataclasses and enums that every other part speaks in. Imports nothing of triptych."""
