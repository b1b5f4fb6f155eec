"""Triptych serves multimodal language models as three panels that scale apart: encode, prefill and decode."""

__version__ = "0.1.0"
