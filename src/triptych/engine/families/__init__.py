"""What each family's modules need of the engine."""
