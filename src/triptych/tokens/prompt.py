"""From a conversation and what is known of its items to the token ids that the model sees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from triptych.domain.chat import Message, TextPart
from triptych.domain.media import MediaInfo
from triptych.errors import ContextTooLong, InvalidRequest
from triptych.families.base import Family, Run
from triptych.families.model_files import BadModel, ModelFiles
from triptych.families.registry import load_family
from triptych.tokens.template import ChatTemplate, local_time
from triptych.tokens.tokenizer import Tokenizer

MAX_CHARS_PER_TOKEN = 32
"""Bounds a prompt's text before it is tokenized; text of any language has fewer than ten."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """``runs[i]`` are the positions that item ``i`` takes; ``token_ids`` has the placeholder at each of them."""

    token_ids: tuple[int, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """Template, tokenizer and family of one model. ``build`` is thread-safe and takes CPU time: call it from a pool."""

    family: Family
    tokenizer: Tokenizer
    template: ChatTemplate
    placeholder: str

    @classmethod
    def load(cls, files: ModelFiles, *, strftime_now: Callable[[str], str] = local_time) -> Self:
        """Raises BadModel when a part is missing, or the parts do not belong together."""
        family = load_family(files)
        tokenizer = Tokenizer.load(files)
        placeholder = tokenizer.id_to_token(family.placeholder_id)
        if placeholder is None:
            raise BadModel(f"the tokenizer does not have the placeholder's id {family.placeholder_id}")
        if tokenizer.encode(placeholder) != [family.placeholder_id]:
            raise BadModel(f"the tokenizer does not keep the placeholder {placeholder!r} in one piece")
        if files.chat_template is None:
            raise BadModel("the model directory has no chat template")
        template = ChatTemplate(
            files.chat_template, tokenizer.special_tokens, placeholder=placeholder, strftime_now=strftime_now
        )
        return cls(family=family, tokenizer=tokenizer, template=template, placeholder=placeholder)

    def build(self, messages: Sequence[Message], infos: Sequence[MediaInfo], tools: str = "") -> Prompt:
        """Template, tokenize and make room for the items; ``infos`` are in the order of ``ChatRequest.media``.

        ``tools`` is a JSON array for the template, or empty.

        The ids equal those of transformers' ``processor.apply_chat_template(..., tokenize=True)``.
        Raises InvalidRequest (InvalidMedia, ContextTooLong) for what the model cannot be asked.
        """
        self._refuse_placeholders(messages)
        counts = [self.family.count_tokens(info) for info in infos]
        max_chars = self.family.context_length * MAX_CHARS_PER_TOKEN
        text = self.template.render(messages, max_chars, tools)
        token_ids = self.tokenizer.encode_prompt(text, max_chars=max_chars)
        places = token_ids.count(self.family.placeholder_id)
        if places < len(counts):
            raise InvalidRequest(
                f"the model's chat template places {places} of {len(counts)} images; "
                "images belong into messages of the user",
                param="messages",
            )
        if places > len(counts):
            raise self._placeholder_in_text(places - len(counts))
        total = len(token_ids) + sum(counts) - places
        if total > self.family.context_length:
            raise ContextTooLong(
                f"the prompt has {total} tokens, {sum(counts)} of them for images; "
                f"the model's context is {self.family.context_length}",
                param="messages",
            )
        return Prompt(*self.family.expand(token_ids, counts))

    def build_raw(self, text: str) -> Prompt:
        """Tokenize a prompt as it stands, without the template. Raises InvalidRequest (ContextTooLong)."""
        max_chars = self.family.context_length * MAX_CHARS_PER_TOKEN
        token_ids = self.tokenizer.encode_prompt(text, max_chars=max_chars)
        if self.family.placeholder_id in token_ids:
            raise InvalidRequest(
                f"prompt: {self.placeholder!r} stands for an image, which a raw prompt has not", param="prompt"
            )
        if not token_ids:
            raise InvalidRequest("prompt: it has no tokens", param="prompt")
        if len(token_ids) > self.family.context_length:
            raise ContextTooLong(
                f"the prompt has {len(token_ids)} tokens; the model's context is {self.family.context_length}",
                param="prompt",
            )
        return Prompt(tuple(token_ids), ())

    def _refuse_placeholders(self, messages: Sequence[Message]) -> None:
        """Text that spells the placeholder would shift every image after it to another's place.

        A template may join a message's texts, so they are looked at as one.
        """
        for message in messages:
            text = "".join(part.text for part in message.parts if isinstance(part, TextPart))
            if count := text.count(self.placeholder):
                raise self._placeholder_in_text(count)

    def _placeholder_in_text(self, count: int) -> InvalidRequest:
        times = "once" if count == 1 else f"{count} times"
        return InvalidRequest(
            f"the messages' text contains {self.placeholder!r} {times}; the model reads that as an image, "
            "so it cannot be part of a text",
            param="messages",
        )
