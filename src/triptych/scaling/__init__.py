"""Scalers (``ports.Scaler``): what makes pools have their wanted sizes."""
