"""A model without files: tokenizer, chat template and family for the fake engines.

Its images take a number of tokens that depends on their size, so that requests mix many lengths.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Self

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.media import MediaInfo, Modality
from triptych.errors import InvalidMedia
from triptych.families.base import Family, Placeholders, PromptReplacement, refuse_unless
from triptych.families.model_files import ModelFiles
from triptych.testing.fakes import FAKE_MODEL, FAKE_PLACEHOLDER_ID, fake_tensors
from triptych.tokens.prompt import PromptBuilder
from triptych.tokens.template import ChatTemplate
from triptych.tokens.tokenizer import Tokenizer

PLACEHOLDER = "<image>"
SPECIAL = ("<unk>", PLACEHOLDER, "<user>", "<assistant>", "<end>")
WORDS = range(len(SPECIAL), len(SPECIAL) + 1000)
"""Ids of ordinary words (``w5``, ``w6``, ...), from which fake answers are made."""

_TEMPLATE = (
    "{%- for message in messages -%}<{{ message['role'] }}> "
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%} <image> {%- else -%} {{ part['text'] }} {% endif -%}"
    "{%- endfor -%}{%- endif -%} <end> {%- endfor -%} <assistant>"
)
_TARGETS = {Modality.IMAGE: PLACEHOLDER}


@dataclass(frozen=True, slots=True)
class FakeFamily:
    """``families.base.Family``: one token per patch of ``patch_px`` x ``patch_px``, partial ones included."""

    patch_px: int = 14
    max_tokens_per_item: int = 256
    model_type: str = "fake"
    hidden_size: int = FAKE_MODEL.hidden_size
    context_length: int = FAKE_MODEL.context_length

    @classmethod
    def load(cls, files: ModelFiles) -> Self:  # noqa: ARG003  # it has no files
        return cls()

    @property
    def replacement_targets(self) -> Mapping[Modality, tuple[int, ...]]:
        return {Modality.IMAGE: (FAKE_PLACEHOLDER_ID,)}

    @property
    def placeholder_ids(self) -> frozenset[int]:
        return frozenset({FAKE_PLACEHOLDER_ID})

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        return (Placeholders(FAKE_PLACEHOLDER_ID, self.tokens(info)),)

    def outputs(self, info: MediaInfo, dtype: DType) -> tuple[TensorSpec, ...]:  # noqa: ARG002  # always float32
        return fake_tensors(self.tokens(info), self.hidden_size)

    def units(self, info: MediaInfo) -> tuple[int, ...]:
        """Rows of patches."""
        rows = -(-info.height // self.patch_px)
        return (self.tokens(info) // rows,) * rows

    def tokens(self, info: MediaInfo) -> int:
        """Tokens of an image. Raises InvalidMedia."""
        refuse_unless(info, Modality.IMAGE)
        tokens = -(-info.width // self.patch_px) * -(-info.height // self.patch_px)
        if tokens > self.max_tokens_per_item:
            raise InvalidMedia(f"the image takes {tokens} positions, the limit is {self.max_tokens_per_item}")
        return tokens


@cache
def fake_tokenizer() -> Tokenizer:
    """One token per word; words are ``w5`` to ``w1004``."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *(f"w{number}" for number in WORDS)))}
    backend = Backend(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend, special_tokens={}, eos_ids=frozenset({SPECIAL.index("<end>")}))


def fake_prompt_builder(family: Family | None = None) -> PromptBuilder:
    """Template, tokenizer and family for the router."""
    return PromptBuilder(
        family=family or FakeFamily(),
        tokenizer=fake_tokenizer(),
        template=_fake_template(),
        targets=_TARGETS,
        placeholders={FAKE_PLACEHOLDER_ID: PLACEHOLDER},
    )


@cache
def _fake_template() -> ChatTemplate:
    """Compiling it takes most of the time of making a simulated router."""
    return ChatTemplate(_TEMPLATE, {}, placeholders=_TARGETS, strftime_now=lambda _: "")
