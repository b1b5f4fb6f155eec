"""Questions, and vLLM's own answers to them from pixels, by a vLLM in a process of its own."""

import base64
import json
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.families.clips import RATE_HZ, samples_of
from tests.integration.families.harness import MARGIN, Item, Question
from tests.vllm.models import KINDS, ServedModel
from triptych.cli.child import child_command
from triptych.domain.media import Modality

MAX_TOKENS = 12
ROOT = Path(__file__).parents[2]
_TRIES = 10


@dataclass(frozen=True)
class Known:
    """A question and vLLM's answer."""

    question: Question
    token_ids: tuple[int, ...]
    clear: bool
    """At every step one token was much likelier than any other, so that rounding cannot change the answer."""


@dataclass
class Reference:
    """vLLM serving one model. It loads in the background until the first question."""

    model: ServedModel
    directory: Path
    log: Path
    _known: dict[tuple[str, int], Known] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                child_command("tests.vllm.answering", str(self.directory)),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def known(self, kind: str, number: int) -> Known:
        """The ``number``-th question of this kind whose answer is clear."""
        found = self._known.get((kind, number))
        if found is None:
            seeds = range(number * _TRIES, (number + 1) * _TRIES)
            asked = (self.ask(self.model.question(KINDS[kind], seed)) for seed in seeds)
            found = self._known[kind, number] = next(example for example in asked if example.clear)
        return found

    def ask(self, question: Question) -> Known:
        said = self._ask({"messages": [message(question)], "max_tokens": MAX_TOKENS})
        return Known(question, tuple(said["token_ids"]), said["margin"] > MARGIN)

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"vLLM ended: {self.log.read_text()[-3000:]}"
        said: dict[str, Any] = json.loads(line)
        return said

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def message(question: Question) -> dict[str, Any]:
    """In the format of the OpenAI API."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else _part(part) for part in question]
    return {"role": "user", "content": content}


def _part(item: Item) -> dict[str, Any]:
    if item.info.modality is Modality.AUDIO:
        return {"type": "input_audio", "input_audio": {"data": _base64(_in_floats(item)), "format": "wav"}}
    return {"type": "image_url", "image_url": {"url": f"data:image/{item.info.format};base64,{_base64(item.media)}"}}


def _base64(media: bytes) -> str:
    return base64.b64encode(media).decode()


def _in_floats(clip: Item) -> bytes:
    """The clip as WAV with floats. Without ``soundfile``, vLLM does not bring integers to a range of 1."""
    (samples,) = samples_of([clip])
    data = samples.astype("<f4").tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, RATE_HZ, RATE_HZ * 4, 4, 32)
    chunks = b"WAVE" + form + struct.pack("<4sI", b"data", len(data)) + data
    return struct.pack("<4sI", b"RIFF", len(chunks)) + chunks
