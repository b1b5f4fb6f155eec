"""The encoder: items in, tickets out."""
