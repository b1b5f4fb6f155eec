"""vLLM as a text engine, with the embeddings of Triptych's encoders, and as an encoder (ADR 28).

Nothing outside of this package imports vLLM, and only ``release`` may be imported where it is not installed.
"""
