"""Options of a text engine."""

from dataclasses import dataclass
from typing import Annotated, Literal

from triptych.domain.bounds import Between
from triptych.domain.limits import Count, Positive, check_limits

_MOST_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Memory and steps of a text engine."""

    engine: Literal["triptych", "vllm"] = "triptych"
    """The text engine: triptych, or vllm, which must be installed. The other options here but vllm_args are those of the first."""
    vllm_args: str = ""
    """Engine vllm: command line with vLLM's own engine arguments (--gpu-memory-utilization, --tensor-parallel-size, ...)."""
    kv_cache_bytes: Positive = 256 << 20
    """KV memory of running sequences; the rest caches prefixes. States that are kept for prefixes take, on a GPU, at most 4 GiB of host
    memory beside it."""
    preempted_kv_bytes: Annotated[int | None, Between(0)] = None
    """Host memory for keys and values of preempted sequences, which are copied back instead of recomputed: pinned on a GPU, on a
    CPU taken as it is used. Unset: as much as ``kv_cache_bytes``, at most 4 GiB. 0, or where copies are found slower at
    start: recompute."""
    max_sequences: Positive = 32
    """Most sequences in one step of the engine."""
    token_budget: Positive | None = None
    """Most tokens in one step of the engine. All prompts of a step are done at its end, and answers wait for it. Empty: on a CPU as many as
    are computed faster together, measured at start; else 2048."""
    tpot_slo_s: Annotated[float | None, Between(0, above=True)] = None
    """Target for the duration of one step, and so for the time between two tokens, seconds.

    At start, steps are measured. The token budget becomes the largest, up to ``token_budget`` or 2048, that takes three
    quarters of the target on an idle instance. Role EPD: likewise for what is encoded beside a step of decodes.
    """
    cross_cache_bytes: Count = 1 << 30
    """KV memory of images (Llama 3.2 Vision) and clips (Whisper) in cross-attention layers; those that do not fit are
    recomputed in every step."""
    enforce_eager: bool = False
    """On a GPU, do not capture CUDA graphs: less memory and a faster start, but slower decoding and short prompts. On a CPU, with float32, do
    not use kernels compiled for the processor."""
    compile_passes: bool = False
    """On a GPU, compile passes with torch.compile before CUDA graphs of them are captured: faster steps, and a slower start."""

    def __post_init__(self) -> None:
        check_limits(self, ("max_sequences", "token_budget"))

    @property
    def most_step_tokens(self) -> int:
        """The token budget where nothing is measured, and the largest that a measurement can choose."""
        return max(_MOST_STEP_TOKENS, self.max_sequences) if self.token_budget is None else self.token_budget
