"""``python -m tests.vllm.answering MODEL``: vLLM's own answers, from pixels: JSON lines of questions in, of answers out.

Greedy, in float32. A question has the ``messages`` of the OpenAI API and ``max_tokens``.
"""

import json
import os
import sys
from importlib import import_module
from typing import Any

os.environ |= {  # noqa: TID251 - read by vLLM when it is imported
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
KV_CACHE_BYTES = 64 << 20


def main() -> None:
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep libraries' output out of the answers
    vllm: Any = import_module("vllm")
    # Images are resized by Pillow, as in Triptych's encoders. Pixels of torchvision differ a little.
    processing: Any = import_module("transformers.models.auto.image_processing_auto")
    processing.is_torchvision_available = lambda: False
    smolvlm: Any = import_module("transformers.models.smolvlm.processing_smolvlm")
    smolvlm.num2words = str  # without the package its processor is not made
    engine = vllm.LLM(
        sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        block_size=32,  # tiny chunks of attention are whole blocks
        distributed_executor_backend="uni",
        limit_mm_per_prompt={"image": 8, "audio": 8, "video": 0},
    )
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = vllm.SamplingParams(temperature=0, max_tokens=asked["max_tokens"], logprobs=2)
        (request,) = engine.chat(asked["messages"], sampling, use_tqdm=False, chat_template_content_format="openai")
        (answer,) = request.outputs
        best = [sorted((token.logprob for token in step.values()), reverse=True)[:2] for step in answer.logprobs]
        said = {
            "prompt_tokens": len(request.prompt_token_ids),
            "token_ids": list(answer.token_ids),
            "margin": min(first - second for first, second in best),
        }
        told.write(json.dumps(said) + "\n")
        told.flush()


if __name__ == "__main__":
    main()
