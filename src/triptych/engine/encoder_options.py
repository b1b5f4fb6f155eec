"""Options of an encoder engine."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """Options that choose the encoder engine."""

    engine: Literal["triptych", "vllm"] = "triptych"
    """The encoder engine: triptych, or vllm, which must be installed."""
    vllm_args: str = ""
    """Engine vllm: command line with vLLM's own engine arguments (--mm-encoder-attn-backend, --quantization)."""
