"""Published Voxtral files: the tokenizer is converted and gets a chat template as in docs/models.md."""

import base64
import json
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from triptych.domain.chat import MediaPart, Message, TextPart
from triptych.domain.media import MediaInfo, Modality
from triptych.families.model_files import ModelFiles
from triptych.tokens.prompt import PromptBuilder

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[3] / "docs/models.md"
SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<pad>",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[AUDIO]",
    "[BEGIN_AUDIO]",
    "<SPECIAL_10>",
]
PATTERN = r"[A-Za-z]+| ?[^\sA-Za-z]+|\s+"
"""Check that Python's regular expressions and the tokenizer's split these texts alike."""
JOINED = [*(b"th the in ing an and 12 !!".split()), b" !", b"  ", b"\xc3\xa9", b"\xe6\x97", b"\xe6\x97\xa5"]
RANKS = {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *JOINED])}
PIECES = ("the", "and", "thing", "é", "日本", "1", "12", " ", "  ", "\n", "!", "B")


def documented(language: str) -> str:
    _, _, section = DOCS.read_text().partition("### Voxtral's tokenizer")
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A published directory with a small vocabulary, after the guide's steps."""
    directory = tmp_path_factory.mktemp("voxtral")
    config = {"model_type": "voxtral", "audio_token_id": SPECIAL.index("[AUDIO]")}
    parts = {"text_config": {"model_type": "llama"}, "audio_config": {"model_type": "voxtral_encoder"}}
    extractor = {"feature_size": 128, "sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30}
    tekken = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(RANKS) + 5,
            "default_vocab_size": len(RANKS) + len(SPECIAL),
            "default_num_special_tokens": len(SPECIAL),
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for token, rank in (*RANKS.items(), *((bytes([rank] * 9), len(RANKS) + rank) for rank in range(5)))
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(SPECIAL)
        ],
    }
    for name, fields in {
        "config.json": config | parts,
        "preprocessor_config.json": extractor,
        "tekken.json": tekken,
    }.items():
        (directory / name).write_text(json.dumps(fields))
    python, *arguments = shlex.split(documented("sh").replace("MODEL", str(directory)))
    assert python == "python"
    subprocess.run([sys.executable, *arguments], check=True, timeout=60)
    (directory / "chat_template.jinja").write_text(documented("jinja"))
    return ModelFiles.load(directory)


def encoded(text: str) -> list[int]:
    """Tekken's rule: in each piece of the pattern, the pair of the lowest rank is merged first."""
    ids: list[int] = []
    for piece in re.findall(PATTERN, text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while True:
            joined = [
                (RANKS[left + right], at) for at, (left, right) in enumerate(pairwise(parts)) if left + right in RANKS
            ]
            if not joined:
                break
            _, at = min(joined)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [RANKS[part] + len(SPECIAL) for part in parts]
    return ids


def test_texts_have_the_token_ids_of_the_published_tokenizer(model: ModelFiles) -> None:
    tokenizer, rng = PromptBuilder.load(model).tokenizer, Random(0)
    assert tokenizer.encode("the thing") == encoded("the thing")
    assert len(encoded("the thing")) == len(("the", " ", "th", "ing"))
    for _ in range(500):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 30)))
        assert tokenizer.encode(text) == encoded(text)


def test_a_conversation_is_rendered_in_the_models_format(model: ModelFiles) -> None:
    builder = PromptBuilder.load(model)
    ids = {token: number for number, token in enumerate(SPECIAL)}
    info = MediaInfo(
        Modality.AUDIO, "wav", 0, 0, 1, bytes(32), duration_s=31.0, samples=31 * 16_000, sample_rate_hz=16_000
    )
    conversation = [
        Message("system", (TextPart("the"),)),
        Message("user", (MediaPart(Modality.AUDIO, b""), TextPart("and the thing"))),
        Message("assistant", (TextPart("the"),)),
        Message("user", (TextPart("thing"),)),
    ]
    prompt = builder.build(conversation, [info])
    (run,) = prompt.runs
    assert list(prompt.token_ids) == [
        ids["<s>"],
        *(ids["[SYSTEM_PROMPT]"], *encoded("the"), ids["[/SYSTEM_PROMPT]"]),
        *(ids["[INST]"], ids["[BEGIN_AUDIO]"], *[ids["[AUDIO]"]] * 750, *encoded("and the thing"), ids["[/INST]"]),
        *(*encoded("the"), ids["</s>"]),
        *(ids["[INST]"], *encoded("thing"), ids["[/INST]"]),
    ]
    assert run.tokens == 750
    assert builder.tokenizer.eos_ids == {ids["</s>"]}
