"""Kubernetes: pools as Deployments (``scaler``), over a few calls of its API (``api``)."""
