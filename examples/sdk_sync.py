"""Ask a router about images, without an event loop.

Usage: python examples/sdk_sync.py [HOST:PORT]
"""

import sys
from pathlib import Path

from triptych import Client
from triptych.client import RawPrompt, assistant, user
from triptych.errors import InvalidMedia

DIGITS = Path(__file__).parent / "digits"
target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"

with Client(target) as client:
    print("models:", ", ".join(model.model_id for model in client.models()))

    # A whole answer, and where it was computed.
    answer = client.chat(
        "What digits are shown?", images=[DIGITS / "3_a.png", DIGITS / "7_a.png"], temperature=0, max_tokens=64
    )
    print("answer:", answer.text)
    for item in client.timeline(answer.request_id).items:
        print(f"image {item.item + 1}: {item.tokens} tokens on {item.encoder}, {item.pull_bytes} bytes pulled")

    # The same, streamed.
    print("stream:", end=" ")
    with client.stream("Which is the largest digit?", images=[DIGITS / "3_a.png", DIGITS / "7_a.png"]) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    print("\ntokens:", stream.usage)

    # A conversation; images as bytes.
    turns = [
        user("What digits are shown?", [(DIGITS / "1_a.png").read_bytes()]),
        assistant("The digits are 1."),
        user("How many images are there?"),
    ]
    print("follow-up:", client.chat(turns, temperature=0, max_tokens=64).text)

    # A raw prompt: text to continue, without a chat template.
    print("raw:", client.chat(RawPrompt("1 2 3"), temperature=0, max_tokens=8).text)

    # Every error is in triptych.errors.
    try:
        client.chat("What is it?", images=["https://example.org/cat.png"])
    except InvalidMedia as error:
        print("refused:", error.message)
