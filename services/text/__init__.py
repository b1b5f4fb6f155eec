"""The text instance: pulls embeddings, prefills, decodes."""
