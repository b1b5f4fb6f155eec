"""The router: the single entry point. It places items on encoders and requests on text instances."""
