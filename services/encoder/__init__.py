"""The encoder service: encodes items and returns tickets."""
