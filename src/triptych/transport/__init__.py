"""Tensors between processes: one Protocol (ports.Transport), one file per backend."""
