"""Turns a conversation into token ids and item plans: the blocking part of a request, run off the event loop."""

import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol, TypeVar

from triptych.domain.chat import ChatRequest, MediaPart, TextPart
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.embedding import slot_nbytes
from triptych.domain.instance import ModelInfo
from triptych.domain.item_plan import ItemPlan, content_of
from triptych.domain.media import MediaInfo
from triptych.domain.resolving import ResolveRequest
from triptych.domain.sampling import Grammar, ResponseFormat, SamplingParams
from triptych.errors import InvalidMedia, InvalidRequest, TriptychError
from triptych.families.base import (
    PromptReplacement,
    Span,
    as_in_request,
    filled,
    filled_positions,
    grid_of,
    refuse_unless,
    units_of,
)
from triptych.families.generic import GenericFamily
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.ports import Offload
from triptych.tokens.answer_text import AnswerText
from triptych.tokens.call_grammar import call_grammar
from triptych.tokens.detokenize import IncrementalDetokenizer
from triptych.tokens.grammar import Grammars
from triptych.tokens.prompt import Prompt, PromptBuilder
from triptych.tokens.reasoning import SYNTAXES, ReasoningReader, after_reasoning
from triptych.tokens.template import read_kwargs
from triptych.tokens.tool_calls import SYNTAXES as CALL_SYNTAXES
from triptych.tokens.tool_calls import CallSyntax, read_tools

from .answer_reader import Calling, Hidden, Reading, Reasoning

T = TypeVar("T")

AUTO = "auto"
EFFORT = "reasoning_effort"
"""A variable of templates that is also a field of requests."""
_MAX_MESSAGES_INLINE = 16
"""Templates loop over messages, so many short messages are slow too."""


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prepared request. ``reading`` is what is to be read from the answer's text, if anything is."""

    token_ids: tuple[int, ...]
    items: tuple[ItemPlan, ...]
    sampling: SamplingParams
    reading: Reading | None = None
    placeholder_ids: AbstractSet[int] = frozenset()
    """Tokens whose positions items fill."""
    ignored: tuple[str, ...] = ()
    """Fields of the request that the chat template does not use."""


class Prepare(Protocol):
    """Blocking and thread-safe. Raises InvalidRequest or a subclass."""

    @property
    def counts_at_once(self) -> bool:
        """Whether an item's tokens are computed; else the model's processor is asked for them, which takes longer."""
        ...

    def __call__(self, request: ChatRequest, model: ModelInfo) -> Prompted: ...

    def items(self, request: ResolveRequest, model: ModelInfo) -> tuple[ItemPlan, ...]:
        """The plans of a request's media, which are in no prompt."""
        ...

    def spell(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Each token's string in the vocabulary."""
        ...


@dataclass(frozen=True, slots=True)
class SmallInline:
    """``ports.Offload`` for ``Prepare`` that runs small requests on the event loop, which is faster than a thread.

    ``max_chars`` limits the text of such a request, ``max_media_bytes`` its media.
    """

    inner: Offload
    max_chars: int
    max_media_bytes: int

    async def run(self, fn: Callable[..., T], /, *args: object) -> T:
        if args and isinstance(args[0], ChatRequest) and self._is_small(args[0]):
            return fn(*args)
        return await self.inner.run(fn, *args)

    def _is_small(self, request: ChatRequest) -> bool:
        if request.sampling.response_format is not None or len(request.messages) > _MAX_MESSAGES_INLINE:
            return False
        if request.tool_choice.forces:
            return False
        begun = request.begun_tokens if request.tools or request.separates_reasoning else 0
        chars, media_bytes = (
            len(request.prompt or "")
            + len(request.prompt_tokens)
            + len(request.tools)
            + len(request.template_kwargs)
            + begun,
            0,
        )
        for message in request.messages:
            if message.tool_calls:
                return False
            chars += len(message.reasoning)
            for part in message.parts:
                if isinstance(part, TextPart):
                    chars += len(part.text)
                else:
                    media_bytes += len(part.data)
        return chars <= self.max_chars and media_bytes <= self.max_media_bytes


@dataclass(frozen=True, slots=True)
class ModelPrepare:
    """``Prepare`` with a model's chat template, tokenizer and family.

    Sampling that the model cannot follow is refused here too, before anything is encoded.
    """

    builder: PromptBuilder
    limits: MediaLimits
    grammars: Grammars
    reasoning: str = AUTO
    """``AUTO`` or the name of one of ``tokens.reasoning.SYNTAXES``; any other for none."""
    tool_syntax: str = AUTO
    """``AUTO`` or the name of one of ``tokens.tool_calls.SYNTAXES``; any other for none."""
    _reasoning: Reasoning | None = field(init=False, repr=False, compare=False)
    """For every prompt, without its tail."""
    _calls: CallSyntax | None = field(init=False, repr=False, compare=False)
    _special: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """The special tokens that do not end an answer."""
    _hidden: Mapping[tuple[bool, bool], Hidden | None] = field(init=False, repr=False, compare=False)
    """What is hidden where calls, or reasoning, have marks that are special tokens; None where they have none."""

    def __post_init__(self) -> None:
        chosen = self.builder.template.reasoning if self.reasoning == AUTO else SYNTAXES.get(self.reasoning)
        tokenizer = self.builder.tokenizer
        known = None if chosen is None else Reasoning(chosen, "", tokenizer.token_to_id(chosen.closing))
        calls = self.builder.template.call_syntax if self.tool_syntax == AUTO else CALL_SYNTAXES.get(self.tool_syntax)
        special = {tokenizer.id_to_token(token_id): token_id for token_id in tokenizer.special_ids - tokenizer.eos_ids}
        object.__setattr__(self, "_reasoning", known)
        object.__setattr__(self, "_calls", calls)
        object.__setattr__(self, "_special", {token: number for token, number in special.items() if token})
        text, marks = "" if calls is None else calls.text, () if chosen is None else chosen.marks
        hidden = {
            (calling, thinking): self._others(text * calling, marks * thinking)
            for calling in (False, True)
            for thinking in (False, True)
        }
        object.__setattr__(self, "_hidden", hidden)

    def _others(self, text: str, marks: Sequence[str]) -> Hidden | None:
        """The special tokens that are neither part of a text nor among the marks; None if no special token is a mark."""
        others = {token: number for token, number in self._special.items() if token not in text and token not in marks}
        if len(others) == len(self._special):
            return None
        longest_first = sorted(others, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        return Hidden(pattern, frozenset(others.values()))

    @property
    def counts_at_once(self) -> bool:
        return not isinstance(self.builder.family, GenericFamily)

    def __call__(self, request: ChatRequest, model: ModelInfo) -> Prompted:
        self._check(request.sampling)
        media, params = _items(request)
        alone = list(map(self._inspect, media, params))
        infos = as_in_request(self.builder.family, alone)
        if request.prompt is None:
            replacements = list(map(self._replacement, infos, params))
            prompt = self.builder.build(
                request.messages, infos, request.tools, kwargs=request.template_kwargs, replacements=replacements
            )
        elif request.prompt_tokens:
            prompt = self.builder.build_tokens(request.prompt_tokens)
        else:
            prompt = self.builder.build_raw(request.prompt)
        items: list[ItemPlan] = []
        for number, (info, span) in enumerate(zip(infos, prompt.runs, strict=True)):
            units = units_of(self.builder.family, info, span.tokens)
            starts = self._unit_starts(units, prompt, span) if len(units) > 1 else ()
            items.append(
                self._plan(
                    number,
                    params[number],
                    media[number],
                    info,
                    span,
                    model,
                    request.tenant_salt,
                    units=units,
                    unit_starts=starts,
                )
            )
        calling, sampling = self._tools(request)
        reasoning, sampling = self._thoughts(request, prompt, sampling)
        reading = None
        if calling is not None or reasoning is not None:
            hidden = None
            if not sampling.special_tokens:
                hidden = self._hidden[calling is not None, reasoning is not None]
                sampling = sampling if hidden is None else replace(sampling, special_tokens=True)
            reading = Reading(calling, reasoning, self._passed_on(request.continued, sampling), hidden)
        placeholder_ids = self.builder.family.placeholder_ids
        return Prompted(prompt.token_ids, tuple(items), sampling, reading, placeholder_ids, self._ignored(request))

    def items(self, request: ResolveRequest, model: ModelInfo) -> tuple[ItemPlan, ...]:
        family = self.builder.family
        params = [f"media[{number}]" for number in range(len(request.media))]
        infos = as_in_request(family, list(map(self._inspect, request.media, params)))
        plans: list[ItemPlan] = []
        for number, (part, info, param) in enumerate(zip(request.media, infos, params, strict=True)):
            tokens = filled(self._replacement(info, param))
            of_item, salt = (number, param, part, info, Span(0, tokens)), request.tenant_salt
            plans.append(self._plan(*of_item, model, salt, units=(tokens,), grid=grid_of(family, info)))
        return tuple(plans)

    def _plan(
        self,
        number: int,
        param: str,
        part: MediaPart,
        info: MediaInfo,
        span: Span,
        model: ModelInfo,
        salt: bytes,
        *,
        units: tuple[int, ...],
        unit_starts: tuple[int, ...] = (),
        grid: tuple[int, ...] = (),
    ) -> ItemPlan:
        """The plan of an item that is not split."""
        tensors = self.builder.family.outputs(info, model.dtype)
        return ItemPlan(
            item=number,
            param=param,
            media=part.data,
            info=info,
            content=content_of(info.digest, None, salt),
            start=span.start,
            tokens=span.tokens,
            tensors=tensors,
            nbytes=slot_nbytes(tensors),
            units=units,
            unit_starts=unit_starts,
            grid=grid,
        )

    def _unit_starts(self, units: tuple[int, ...], prompt: Prompt, span: Span) -> tuple[int, ...]:
        positions = filled_positions(prompt.token_ids, span, self.builder.family.placeholder_ids)
        return tuple(positions[done] for done in (0, *accumulate(units[:-1])))

    def spell(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.builder.tokenizer.id_to_token(token_id) or "" for token_id in token_ids)

    def _tools(self, request: ChatRequest) -> tuple[Calling | None, SamplingParams]:
        """The tool call format, and sampling that forces a call if one is required. Raises InvalidRequest."""
        sampling, choice = request.sampling, request.tool_choice
        if not request.tools:
            return None, sampling
        tools, syntax = read_tools(request.tools), self._calls
        if choice.forces:
            if syntax is None:
                raise InvalidRequest(
                    "tool_choice: the tool call format of the model's chat template is not known, so a call cannot be "
                    "forced; use 'auto' or 'none'",
                    param="tool_choice",
                )
            wanted = [tool for tool in tools if choice.name in ("", tool.name)]
            if not wanted:
                raise InvalidRequest(f"tool_choice: there is no tool {choice.name[:64]!r}", param="tool_choice")
            marks = {token: token_id for token, token_id in self._special.items() if token in syntax.text}
            several = choice.parallel and not choice.name
            grammar = call_grammar(syntax, wanted, parallel=several, special_ids=marks)
            sampling = replace(sampling, response_format=ResponseFormat(Grammar.LARK, grammar))
            self.grammars.start(ResponseFormat(Grammar.LARK, grammar))
        elif sampling.response_format is not None:
            return None, sampling  # the answer must match a format that is no call
        if syntax is None:
            return None, sampling
        parameters = {tool.name: tool.parameters for tool in tools}
        return Calling(syntax, parameters, choice.parallel, request.streams_arguments), sampling

    def _thoughts(
        self, request: ChatRequest, prompt: Prompt, sampling: SamplingParams
    ) -> tuple[Reasoning | None, SamplingParams]:
        """How reasoning is found, if it is to be; and sampling whose grammar holds for what follows it. Raises InvalidRequest."""
        if self._reasoning is None or not request.separates_reasoning or request.prompt is not None:
            return None, sampling
        reasoning, tokenizer = replace(self._reasoning, prompt_tail=prompt.tail), self.builder.tokenizer
        new = ReasoningReader(reasoning.syntax, prompt.tail)
        if new.thinking is False:
            return None, sampling
        if sampling.response_format is not None:
            wanted = after_reasoning(
                sampling.response_format, new, reasoning.syntax, tokenizer.token_to_id, tokenizer.eos_ids
            )
            self.grammars.start(wanted)
            sampling = replace(sampling, response_format=wanted)
        return reasoning, sampling

    def _ignored(self, request: ChatRequest) -> tuple[str, ...]:
        if not request.template_kwargs:
            return ()
        unused = read_kwargs(request.template_kwargs).keys() - self.builder.template.variables
        return tuple(name if name == EFFORT else f"chat_template_kwargs.{name}" for name in sorted(unused))

    def _passed_on(self, continued: Sequence[ContinuedChoice], sampling: SamplingParams) -> dict[int, list[str]]:
        """The text that each token of the choices that go on has completed."""
        texts: dict[int, list[str]] = {}
        for choice in continued:
            text = AnswerText(IncrementalDetokenizer(self.builder.tokenizer), sampling)
            texts[choice.choice] = [text.feed((token_id,)) for token_id in choice.token_ids]
        return texts

    def _check(self, sampling: SamplingParams) -> None:
        """Checks that depend on the vocabulary."""
        if sampling.logit_bias or sampling.stop_token_ids:
            vocab_size = self.builder.tokenizer.vocab_size
            for name, token_ids in (
                ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
                ("stop_token_ids", sampling.stop_token_ids),
            ):
                for token_id in token_ids:
                    if not 0 <= token_id < vocab_size:
                        message = f"{name} names token {token_id}, the vocabulary has {vocab_size}"
                        raise InvalidRequest(message, param=name)
        if sampling.response_format is not None:
            self.grammars.start(sampling.response_format)

    def _inspect(self, part: MediaPart, param: str) -> MediaInfo:
        family = self.builder.family
        try:
            refuse_unless(part, *family.replacement_targets)
            info = inspect_media(part.data, self.limits)
            if info.modality is not part.modality:
                raise InvalidMedia(f"the item is not of type {part.modality.value}")
        except TriptychError as error:
            # The sniffer sees only bytes; the client needs the item's place in the request.
            error.param = error.param or param
            raise
        return info

    def _replacement(self, info: MediaInfo, param: str) -> PromptReplacement:
        try:
            return self.builder.family.prompt_replacement(info)
        except TriptychError as error:
            error.param = error.param or param
            raise


def _items(request: ChatRequest) -> tuple[list[MediaPart], list[str]]:
    """The items in the order of the prompt, and for each the request field that holds it."""
    media: list[MediaPart] = []
    params: list[str] = []
    for number, message in enumerate(request.messages):
        for position, part in enumerate(message.parts):
            if isinstance(part, MediaPart):
                media.append(part)
                params.append(f"messages[{number}].content[{position}]")
    return media, params
