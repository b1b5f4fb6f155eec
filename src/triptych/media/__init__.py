"""Untrusted media: sniffing, hashing and bounding, without decoding pixels."""
