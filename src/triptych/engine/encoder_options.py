"""What an encoder engine can be told."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """Which encoder engine runs."""

    engine: Literal["triptych", "vllm"] = "triptych"
    """The encoder engine: triptych, or vllm, which must be installed."""
    vllm_args: str = ""
    """Engine vllm: command line with vLLM's own engine arguments (--mm-encoder-attn-backend, --quantization)."""
