"""A model that is nowhere on disk: tokenizer, chat template and family of the fake engines.

Its images take a number of positions that depends on their size, so that requests mix runs of many lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from triptych.domain.media import MediaInfo
from triptych.errors import InvalidMedia
from triptych.families.base import Run, expand_runs
from triptych.families.model_files import ModelFiles
from triptych.testing.fakes import FAKE_MODEL
from triptych.tokens.prompt import PromptBuilder
from triptych.tokens.template import ChatTemplate
from triptych.tokens.tokenizer import Tokenizer

PLACEHOLDER = "<image>"
SPECIAL = ("<unk>", PLACEHOLDER, "<user>", "<assistant>", "<end>")
WORDS = range(len(SPECIAL), len(SPECIAL) + 1000)
"""Ids of ordinary words: ``w5``, ``w6``, ... They are the vocabulary that fake answers are made of."""

_TEMPLATE = (
    "{%- for message in messages -%}<{{ message['role'] }}> "
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%} <image> {%- else -%} {{ part['text'] }} {% endif -%}"
    "{%- endfor -%}{%- endif -%} <end> {%- endfor -%} <assistant>"
)


@dataclass(frozen=True, slots=True)
class FakeFamily:
    """``families.base.Family``: one position for each ``patch_px`` x ``patch_px`` patch of an image, begun ones too."""

    patch_px: int = 14
    max_tokens_per_item: int = 256
    model_type: str = "fake"
    placeholder_id: int = SPECIAL.index(PLACEHOLDER)
    hidden_size: int = FAKE_MODEL.hidden_size
    context_length: int = FAKE_MODEL.context_length
    shardable: bool = False

    @classmethod
    def load(cls, files: ModelFiles) -> Self:  # noqa: ARG003  # it has no files
        return cls()

    def count_tokens(self, info: MediaInfo) -> int:
        tokens = -(-info.width // self.patch_px) * -(-info.height // self.patch_px)
        if tokens > self.max_tokens_per_item:
            raise InvalidMedia(f"the image takes {tokens} positions, the limit is {self.max_tokens_per_item}")
        return tokens

    def expand(self, token_ids: Sequence[int], counts: Sequence[int]) -> tuple[tuple[int, ...], tuple[Run, ...]]:
        return expand_runs(token_ids, self.placeholder_id, counts)


def fake_tokenizer() -> Tokenizer:
    """One token per word, words are ``w5`` to ``w1004``."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *(f"w{number}" for number in WORDS)))}
    backend = Backend(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend, special_tokens={}, eos_ids=frozenset({SPECIAL.index("<end>")}))


def fake_prompt_builder(family: FakeFamily | None = None) -> PromptBuilder:
    """Template, tokenizer and family together, as the router takes them."""
    template = ChatTemplate(_TEMPLATE, {}, placeholder=PLACEHOLDER, strftime_now=lambda _: "")
    return PromptBuilder(
        family=family or FakeFamily(), tokenizer=fake_tokenizer(), template=template, placeholder=PLACEHOLDER
    )
