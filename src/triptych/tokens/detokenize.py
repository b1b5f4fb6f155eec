"""Incremental detokenization.

``tokenizers.decoders.DecodeStream`` is not used. It cannot be flushed, so an answer that ends within a character or in
U+FFFD loses its end. It also raises on byte sequences that never become valid.
"""

from collections.abc import Sequence

from triptych.tokens.tokenizer import BYTE_TOKEN, Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8
"""Context tokens with which the next one is decoded, at least. Decoders look back one token; UTF-8 up to four bytes."""
_MOST_CONTEXT_TOKENS = 2 * _CONTEXT_TOKENS
"""The text of the context is known from the token before, until the context has this many and is cut."""


class IncrementalDetokenizer:
    """Turns one answer's token ids into pieces of its text.

    Together they equal ``Tokenizer.decode`` of the whole answer without special tokens, with one exception: in a run of
    byte-fallback tokens, valid characters before an invalid byte are kept, while decoding the whole replaces the entire
    run with U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._skips = True
        self._special = tokenizer.special_ids
        self._byte_fallback = tokenizer.byte_fallback
        self._incomplete = "" if tokenizer.byte_fallback else _REPLACEMENT
        """How text may end whose last character is incomplete, in byte-level vocabularies."""
        self._context: list[int] = []
        self._context_text: str | None = ""
        """The text of the context without an incomplete character; None if it has not been decoded."""
        self._pending_bytes = b""

    def show_special_tokens(self) -> None:
        """Write special tokens as text, those that end an answer excepted. Before the first token."""
        self._skips, self._special = False, self._tokenizer.eos_ids

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is incomplete."""
        text = ""
        for token_id in token_ids:
            if token_id not in self._special:
                text += self._feed(token_id)
        return text

    def flush(self) -> str:
        """The rest at the end of the answer: U+FFFD for an incomplete character."""
        whole = self._decoded()
        text = self._flush_bytes() + whole[len(whole.removesuffix(self._incomplete)) :]
        self._context, self._context_text = [], ""
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be part of a character."""
        return self._tokenizer.token_bytes(token_id)

    def _feed(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # decoding skips ids that are not in the vocabulary
            return ""
        if self._byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            self._context, self._context_text = [*self._context, token_id][-_CONTEXT_TOKENS:], None
            return self._feed_byte(bytes.fromhex(match[1]))
        text = self._flush_bytes() if self._pending_bytes else ""
        if len(self._context) >= _MOST_CONTEXT_TOKENS:
            self._context, self._context_text = self._context[-_CONTEXT_TOKENS:], None
        before = self._context_text
        if before is None:
            before = self._decoded().removesuffix(self._incomplete)
        self._context.append(token_id)
        self._context_text = after = self._decoded().removesuffix(self._incomplete)
        return text + after[len(before) :]

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._context, skip_special_tokens=self._skips)

    def _feed_byte(self, byte: bytes) -> str:
        self._pending_bytes += byte
        try:
            text = self._pending_bytes.decode("utf-8")
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            return self._flush_bytes()
        if len(self._context) == len(self._pending_bytes):  # at the start of the answer decoders may drop a space
            text = self._decoded()
        self._pending_bytes = b""
        return text

    def _flush_bytes(self) -> str:
        text, self._pending_bytes = _REPLACEMENT * len(self._pending_bytes), b""
        return text
