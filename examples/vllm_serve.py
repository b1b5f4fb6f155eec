"""Ask a ``vllm serve`` that runs by itself about images, whose embeddings come from Triptych's encoders (docs/vllm.md).

Usage: python examples/vllm_serve.py [HOST:PORT of a router] [URL of vLLM] [MODEL]
"""

import sys
from pathlib import Path
from typing import Any

import httpx

from triptych import Client
from triptych.integrations.vllm.parts import image_part

DIGITS = Path(__file__).parent / "digits"
given = dict(enumerate(sys.argv))
router = given.get(1, "127.0.0.1:50051")
vllm = given.get(2, "http://127.0.0.1:8000")
model = given.get(3, "triptych-demo")


def chat(content: list[dict[str, Any]]) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 64}
    response = httpx.post(f"{vllm}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


# Within the context the encoders hold the embeddings; vLLM pulls them from there.
with Client(router) as client, client.resolve([DIGITS / "3_a.png", DIGITS / "7_a.png"]) as items:
    for item in items:
        print(f"{item.uuid[:12]}: {item.ticket.tokens} tokens, {'cached' if item.cached else 'encoded'}")
    question = {"type": "text", "text": "What digits are shown?"}
    print("answer:", chat([*(image_part(item) for item in items), question]))
