"""Compute: encoder and text engines over transformers. Nothing else imports torch."""
