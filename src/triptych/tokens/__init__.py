"""Text as token ids: chat templates, tokenizing, incremental detokenizing and stop strings (torch-free)."""
