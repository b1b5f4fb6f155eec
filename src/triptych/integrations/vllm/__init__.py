"""vLLM as a text engine, with the embeddings of Triptych's encoders (ADR 28), and as an encoder (ADR 30).

Nothing outside of this package imports vLLM, and only ``release`` may be imported where it is not installed.
"""
