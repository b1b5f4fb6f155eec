"""The language model: batches, KV memory, attention, sampling."""
