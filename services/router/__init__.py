"""The router: one entrance, placing items on encoders and requests on text instances."""
