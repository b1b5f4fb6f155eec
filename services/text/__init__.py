"""The text service: pulls embeddings, prefills, decodes."""
