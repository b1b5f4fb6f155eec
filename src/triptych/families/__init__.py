"""Model families: token counts and placeholders, from configuration and size alone (torch-free)."""
