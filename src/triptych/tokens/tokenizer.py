"""Tokenization like transformers, with only the ``tokenizers`` library."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from triptych.errors import InvalidRequest
from triptych.families.model_files import BadModel, ModelFiles

MAX_CHARS = 4_000_000
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte token of a vocabulary with byte fallback."""

OTHER_FORMATS = ("tekken.json", "tokenizer.model", "vocab.json", "tiktoken.model", "*.tiktoken")
"""Files of tokenizers that have other libraries: Mistral's, SentencePiece, byte pairs of GPT-2, tiktoken."""

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer. Thread-safe; releases the GIL while encoding."""

    def __init__(self, backend: Backend, *, special_tokens: Mapping[str, str], eos_ids: frozenset[int]) -> None:
        self.backend = backend
        self.special_tokens = special_tokens
        """Named special tokens (``bos_token``) for the chat template."""
        self.eos_ids = eos_ids
        """Ids that end an answer."""
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids that ``decode`` skips."""
        steps = _decoder_steps(backend)
        self.byte_fallback = "ByteFallback" in steps
        """Whether tokens such as ``<0xE4>`` represent single bytes."""
        self._byte_level = "ByteLevel" in steps

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        """Load ``tokenizer.json`` including its post-processor, as transformers does for these families.

        Raises BadModel if it is missing or invalid.
        """
        if not files.tokenizer_file.is_file():
            found = [path.name for pattern in OTHER_FORMATS for path in files.directory.glob(pattern)]
            if found:
                raise BadModel(
                    f"the model directory has {found[0]} and no tokenizer.json: docs/models.md says how to convert it"
                )
            raise BadModel("the model directory has no tokenizer.json")
        try:
            backend = Backend.from_file(str(files.tokenizer_file))
        except Exception as error:  # tokenizers raises Exception itself
            raise BadModel(f"tokenizer.json cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = files.tokenizer_config
        special_tokens = _special_tokens(config)
        _add_configured_tokens(backend, config, special_tokens)
        return cls(backend, special_tokens=special_tokens, eos_ids=_eos_ids(files, backend, special_tokens))

    def encode(self, text: str, *, add_special_tokens: bool = False, max_chars: int = MAX_CHARS) -> list[int]:
        """Token ids of a text; special tokens written out in it become their ids.

        Raises InvalidRequest for a text of more than ``max_chars`` characters or with unpaired surrogates.
        """
        if len(text) > max_chars:
            raise InvalidRequest(f"the text has {len(text)} characters, the limit is {max_chars}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text has an unpaired surrogate at character {error.start}") from error
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_prompt(self, text: str, *, max_chars: int = MAX_CHARS) -> list[int]:
        """Token ids of a rendered prompt, like a processor's ``apply_chat_template(tokenize=True)``.

        The tokenizer's special tokens are added unless the prompt starts with one. Raises like ``encode``.
        """
        bos = self.special_tokens.get("bos_token")
        return self.encode(text, add_special_tokens=not (bos and text.startswith(bos)), max_chars=max_chars)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids outside the vocabulary are skipped."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token's string in the vocabulary, or None."""
        return self.backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token within a text; empty for ids outside the vocabulary."""
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if self._byte_level and all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        if self.byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.replace(_SPACE, " ").encode()

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))


def _decoder_steps(backend: Backend) -> frozenset[str]:
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return frozenset(step.get("type", "") for step in decoder.get("decoders", [decoder]))


def _byte_characters() -> dict[str, int]:
    """GPT-2's table of byte characters: printable bytes are themselves, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_characters()
_SPACE = "\u2581"
"""SentencePiece's space."""


def _content(token: Any) -> str | None:
    """A token is a string, or an object with a ``content``."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    model_specific = config.get("model_specific_special_tokens") or config.get("extra_special_tokens") or {}
    named = {name: config.get(name) for name in _NAMED_TOKENS}
    if isinstance(model_specific, Mapping):
        named |= model_specific
    return {name: content for name, token in named.items() if (content := _content(token)) is not None}


def _add_configured_tokens(backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Add the tokens that tokenizer_config.json names and tokenizer.json lacks."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    described = config.get("added_tokens_decoder") or {}
    for _, fields in sorted(described.items(), key=lambda entry: int(entry[0])):
        if isinstance(fields, Mapping) and fields.get("content") not in known:
            flags = {
                name: bool(fields[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in fields
            }
            backend.add_tokens([AddedToken(fields["content"], special=bool(fields.get("special")), **flags)])
            known.add(fields["content"])
    extra = config.get("extra_special_tokens")
    contents = [*special_tokens.values(), *(filter(None, map(_content, extra)) if isinstance(extra, list) else ())]
    for content in dict.fromkeys(contents):
        if content not in known:
            backend.add_special_tokens([content])


def _eos_ids(files: ModelFiles, backend: Backend, special_tokens: Mapping[str, str]) -> frozenset[int]:
    text_config = files.config.get("text_config") or {}
    for section in (files.generation_config, files.config, text_config):
        value = section.get("eos_token_id")
        if isinstance(value, int):
            return frozenset({value})
        if isinstance(value, list) and value:
            return frozenset(int(item) for item in value)
    eos = special_tokens.get("eos_token")
    token_id = backend.token_to_id(eos) if eos else None
    return frozenset() if token_id is None else frozenset({token_id})
