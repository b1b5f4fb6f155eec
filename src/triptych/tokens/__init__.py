"""Text to token ids and back: chat templates, tokenizing, incremental detokenizing, stop strings. No torch."""
