"""Model families: prompt replacements and embedding shapes, from configuration and media size alone. No torch."""
