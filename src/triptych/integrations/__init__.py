"""Adapters to the systems of others."""
