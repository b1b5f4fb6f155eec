"""Parts of the engine that belong to a family of models."""
