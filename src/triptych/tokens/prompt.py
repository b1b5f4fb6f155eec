"""Builds the prompt's token ids from a conversation and its items."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from triptych.domain.chat import Message, TextPart
from triptych.domain.media import MediaInfo, Modality
from triptych.errors import ContextTooLong, InvalidRequest
from triptych.families.base import Family, Placeholders, Prefixed, PromptReplacement, Span, Templated
from triptych.families.generic import StartProcessing
from triptych.families.model_files import BadModel, ModelFiles
from triptych.families.registry import load_family
from triptych.tokens.processor_process import ProcessorProcess
from triptych.tokens.reasoning import MAX_TAIL_CHARS
from triptych.tokens.template import ChatTemplate, local_time, read_kwargs
from triptych.tokens.tokenizer import Tokenizer

MAX_CHARS_PER_TOKEN = 32
"""Limits a prompt's text before it is tokenized; natural text has fewer than ten characters per token."""
_NONE_LEFT = Placeholders(-1, 0)


@dataclass(frozen=True, slots=True)
class Prompt:
    """``runs[i]`` is the span that item ``i`` fills; ``token_ids`` has a placeholder at each position of it. ``tail`` is the end
    of a rendered template.
    """

    token_ids: tuple[int, ...]
    runs: tuple[Span, ...]
    tail: str = ""


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """Template, tokenizer and family of one model. ``build`` is thread-safe and CPU-bound: run it in a pool.

    ``targets`` are the strings that the template writes for an item of each modality; ``placeholders`` are the strings
    of the placeholder tokens in its replacement.
    """

    family: Family
    tokenizer: Tokenizer
    template: ChatTemplate
    targets: Mapping[Modality, str]
    placeholders: Mapping[int, str]
    _target: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _reserved: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        longest_first = sorted(set(self.targets.values()), key=len, reverse=True)
        object.__setattr__(self, "_target", re.compile("|".join(map(re.escape, longest_first))))
        object.__setattr__(self, "_reserved", tuple(dict.fromkeys((*longest_first, *self.placeholders.values()))))

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        *,
        strftime_now: Callable[[str], str] = local_time,
        process: StartProcessing = ProcessorProcess,
    ) -> Self:
        """``process`` loads the processor of a model without a family of its own.

        Raises BadModel if a file is missing, or the files do not match.
        """
        family = load_family(files, process)
        tokenizer = Tokenizer.load(files)
        targets = {
            modality: "".join(_spelled(tokenizer, token_id) for token_id in token_ids)
            for modality, token_ids in family.replacement_targets.items()
        }
        placeholders = {token_id: _spelled(tokenizer, token_id) for token_id in sorted(family.placeholder_ids)}
        source = files.chat_template
        if source is None and isinstance(family, Templated):
            source = family.chat_template
        if source is None:
            raise BadModel("the model directory has no chat template")
        template = ChatTemplate(
            source,
            tokenizer.special_tokens,
            tools_source=files.tools_template,
            placeholders=targets,
            strftime_now=strftime_now,
        )
        return cls(family=family, tokenizer=tokenizer, template=template, targets=targets, placeholders=placeholders)

    def build(
        self,
        messages: Sequence[Message],
        infos: Sequence[MediaInfo],
        tools: str = "",
        *,
        kwargs: str = "",
        replacements: Sequence[PromptReplacement] | None = None,
    ) -> Prompt:
        """Render the template, tokenize, expand placeholders. ``infos`` are in the order of ``ChatRequest.media``.

        ``tools`` is a JSON array for the template, ``kwargs`` a JSON object of further variables, or empty. ``replacements`` are the items', if already computed. The
        ids equal those of transformers' ``processor.apply_chat_template(..., tokenize=True)``. Raises InvalidRequest
        (InvalidMedia, ContextTooLong).
        """
        self._refuse_placeholders(messages, kwargs)
        if replacements is None:
            replacements = [self.family.prompt_replacement(info) for info in infos]
        max_chars = self.family.context_length * MAX_CHARS_PER_TOKEN
        text = self.template.render(messages, max_chars, tools, kwargs)
        tail = text[-MAX_TAIL_CHARS:]
        text = self._replace(text, infos, replacements)
        if isinstance(self.family, Prefixed) and not text.startswith(self.family.prompt_prefix):
            text = self.family.prompt_prefix + text
        encode = self.tokenizer.encode if isinstance(self.family, Templated) else self.tokenizer.encode_prompt
        token_ids = encode(text, max_chars=max_chars)
        positions = [part for replacement in replacements for part in replacement if isinstance(part, Placeholders)]
        filled = sum(part.count for part in positions)
        total = len(token_ids) + filled - len(positions)
        if total > self.family.context_length:
            raise ContextTooLong(
                f"the prompt has {total} tokens, {filled} of them for {_named(infos)}; "
                f"the model's context is {self.family.context_length}",
                param="messages",
            )
        return self._expand(token_ids, replacements, tail)

    def build_raw(self, text: str) -> Prompt:
        """Tokenize a prompt without the template. Raises InvalidRequest (ContextTooLong)."""
        max_chars = self.family.context_length * MAX_CHARS_PER_TOKEN
        return self.build_tokens(self.tokenizer.encode_prompt(text, max_chars=max_chars))

    def build_tokens(self, token_ids: Sequence[int]) -> Prompt:
        """A prompt of these tokens. Raises InvalidRequest (ContextTooLong)."""
        if token_ids and max(token_ids) >= self.tokenizer.vocab_size:
            raise InvalidRequest(
                f"prompt: there is no token {max(token_ids)}, the vocabulary has {self.tokenizer.vocab_size}",
                param="prompt",
            )
        for token_id, placeholder in self.placeholders.items():
            if token_id in token_ids:
                raise InvalidRequest(
                    f"prompt: {placeholder!r} is a placeholder for an item, which a raw prompt cannot have",
                    param="prompt",
                )
        if not token_ids:
            raise InvalidRequest("prompt: it is empty", param="prompt")
        if len(token_ids) > self.family.context_length:
            raise ContextTooLong(
                f"the prompt has {len(token_ids)} tokens; the model's context is {self.family.context_length}",
                param="prompt",
            )
        return Prompt(tuple(token_ids), ())

    def _replace(self, text: str, infos: Sequence[MediaInfo], replacements: Sequence[PromptReplacement]) -> str:
        """The rendered prompt with each target replaced; each ``Placeholders`` is written as one token."""
        matches = list(self._target.finditer(text))
        if len(matches) < len(infos):
            raise InvalidRequest(
                f"the model's chat template places {len(matches)} of {len(infos)} {_named(infos)}; "
                "put them into user messages",
                param="messages",
            )
        if len(matches) > len(infos):
            raise self._placeholder_in_text(matches[-1][0], len(matches) - len(infos))
        pieces: list[str] = []
        end = 0
        for match, info, replacement in zip(matches, infos, replacements, strict=True):
            if match[0] != self.targets[info.modality]:
                raise InvalidRequest("the model's chat template reorders the items", param="messages")
            pieces.append(text[end : match.start()])
            pieces += [part if isinstance(part, str) else self.placeholders[part.token_id] for part in replacement]
            end = match.end()
        return "".join((*pieces, text[end:]))

    def _expand(self, token_ids: Sequence[int], replacements: Sequence[PromptReplacement], tail: str) -> Prompt:
        """Repeat each placeholder token ``count`` times."""
        expected = self._placeholders(replacements)
        expanded: list[int] = []
        starts: list[int] = []
        filled: list[int] = []
        """By item: where its span begins, and its positions."""
        for token_id in token_ids:
            if token_id not in self.placeholders:
                expanded.append(token_id)
                continue
            item, positions = next(expected, (-1, _NONE_LEFT))
            if positions.token_id != token_id:
                raise self._placeholder_in_text(self.placeholders[token_id], 1)
            if item == len(starts):
                starts.append(len(expanded))
                filled.append(0)
            filled[item] += positions.count
            expanded.extend([token_id] * positions.count)
        if next(expected, None) is not None:
            raise InvalidRequest("the model's chat template merges an item with the text around it", param="messages")
        return Prompt(tuple(expanded), tuple(map(Span, starts, filled)), tail)

    @staticmethod
    def _placeholders(replacements: Sequence[PromptReplacement]) -> Iterator[tuple[int, Placeholders]]:
        for item, replacement in enumerate(replacements):
            for part in replacement:
                if isinstance(part, Placeholders):
                    yield item, part

    def _refuse_placeholders(self, messages: Sequence[Message], kwargs: str) -> None:
        """Refuse text that contains a placeholder, which would shift all later items.

        A template may join a message's texts, so they are searched together.
        """
        written = json.dumps(read_kwargs(kwargs), ensure_ascii=False) if kwargs else ""
        for reserved in self._reserved:
            if reserved in written:
                param = "chat_template_kwargs"
                raise InvalidRequest(f"{param}: {reserved!r} is a placeholder for an item", param=param)
        for message in messages:
            text = message.reasoning
            for part in message.parts:
                if isinstance(part, TextPart):
                    text += part.text
            for call in message.tool_calls:
                text += call.name + call.arguments
            for reserved in self._reserved:
                if count := text.count(reserved):
                    raise self._placeholder_in_text(reserved, count)

    def _placeholder_in_text(self, placeholder: str, count: int) -> InvalidRequest:
        times = "once" if count == 1 else f"{count} times"
        return InvalidRequest(
            f"the messages' text contains {placeholder!r} {times}; the model would read that as an item, "
            "so text cannot contain it",
            param="messages",
        )


def _spelled(tokenizer: Tokenizer, token_id: int) -> str:
    token = tokenizer.id_to_token(token_id)
    if token is None:
        raise BadModel(f"the tokenizer lacks the placeholder's id {token_id}")
    if tokenizer.encode(token) != [token_id]:
        raise BadModel(f"the tokenizer splits the placeholder {token!r}")
    return token


def _named(infos: Sequence[MediaInfo]) -> str:
    """Name the items for messages: images, videos, audio clips, or items if mixed."""
    kinds = {info.modality.value for info in infos}
    if kinds == {Modality.AUDIO.value}:
        return "audio clips"
    return f"{kinds.pop()}s" if len(kinds) == 1 else "items"
