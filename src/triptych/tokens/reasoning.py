"""Reasoning: what a model writes before its answer, separated from it; and grammars that hold for the answer alone.

The chat template writes or removes the marks of reasoning, so its text identifies them. Most models write a block between
two marks, which some templates open in the prompt. gpt-oss writes messages on named channels.
"""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from triptych.domain.sampling import Grammar, ResponseFormat
from triptych.tokens.grammar import JSON_OVERRIDES, schema_of
from triptych.tokens.tool_calls import possible_prefix

MAX_TAIL_CHARS = 64
"""Characters at the end of a prompt that decide whether it opens a block."""
_MAX_HEADER_CHARS = 256
_MAX_GAP_CHARS = 256
"""White space that may stand before a mark. More is text: what is held must be bounded."""
_CHANNEL, _MESSAGE, _END, _START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
_ENDS = (_END, "<|call|>", "<|return|>", _START)
_END_OF_MESSAGE = re.compile("|".join(map(re.escape, _ENDS)))
_THOUGHT_CHANNEL, _ANSWER_CHANNEL = "analysis", "final"


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """Marks around a block of reasoning. ``label`` begins the text within them, and is no part of the thought."""

    name: str
    opening: str
    closing: str
    label: str = ""

    @property
    def has_channels(self) -> bool:
        return self.opening == _CHANNEL

    @property
    def marks(self) -> tuple[str, ...]:
        return (_CHANNEL, _MESSAGE, *_ENDS) if self.has_channels else (self.opening, self.closing)


SYNTAXES = {
    syntax.name: syntax
    for syntax in (
        ReasoningSyntax("gpt_oss", _CHANNEL, _END),
        ReasoningSyntax("gemma4", "<|channel>", "<channel|>", "thought\n"),
        ReasoningSyntax("mistral", "[THINK]", "[/THINK]"),
        ReasoningSyntax("kimi_vl", "◁think▷", "◁/think▷"),
        ReasoningSyntax("think", "<think>", "</think>"),
    )
}
"""By name: ``think`` is the one of Qwen, DeepSeek, GLM, Kimi K2 and most others."""


def find_reasoning(template: str) -> ReasoningSyntax | None:
    """The syntax whose closing mark is in a chat template; None if there is none."""
    return next((syntax for syntax in SYNTAXES.values() if syntax.closing in template and _has(syntax, template)), None)


def _has(syntax: ReasoningSyntax, template: str) -> bool:
    return not syntax.has_channels or (_CHANNEL in template and _MESSAGE in template)


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning."""

    text: str


class ReasoningReader:
    """Separates one answer's reasoning from its text, however it is chunked.

    Text without marks is returned unchanged. White space next to a block is dropped. Only what may still become a mark is
    held back.
    """

    def __init__(self, syntax: ReasoningSyntax, prompt_tail: str = "") -> None:
        """``prompt_tail``: the last ``MAX_TAIL_CHARS`` of the prompt, which may open a block, or open and close it."""
        tail = prompt_tail.rstrip()
        self._syntax = syntax
        self._held = ""
        self._gap = False
        """Whether white space before the answer is still to be dropped."""
        self._expected = tuple(filter(None, (syntax.opening, syntax.label)))
        """Marks that may precede the thought, and are dropped ..."""
        self._has_begun = False
        """... until it has begun."""
        self._in_message = False
        self._last: type[str | Thought] | None = None
        """Kind of the channel message before, from which the next one of its kind is separated."""
        self.thinking: bool | None = None
        """Whether the text so far ends in reasoning; None while that is open."""
        if not syntax.has_channels and tail.endswith(syntax.opening):
            self.thinking = True
        elif not syntax.has_channels and tail.endswith(syntax.closing):
            self.thinking = False

    def feed(self, text: str) -> list[str | Thought]:
        """Parts that this piece completes, in order."""
        self._held += text
        out: list[str | Thought] = []
        step = self._channel_step if self._syntax.has_channels else self._block_step
        while step(out):
            pass
        return out

    def flush(self) -> list[str | Thought]:
        """The held text, at the end of the answer."""
        text, self._held = self._held, ""
        if self._syntax.has_channels and not self._in_message and text.lstrip().startswith((_CHANNEL, _START)):
            return []  # an incomplete header
        if self.thinking and not self._syntax.has_channels:
            text = text.rstrip() if self._has_begun else text.strip()
        if not text:
            return []
        return [Thought(text) if self.thinking else text]

    def _block_step(self, out: list[str | Thought]) -> bool:
        """Process one element at the start of the held text. Returns whether to go on."""
        if self.thinking is None:
            rest, opening = self._held.lstrip(), self._syntax.opening
            if len(self._held) - len(rest) > _MAX_GAP_CHARS:
                self.thinking = False
                return True
            if opening.startswith(rest):
                self.thinking = True if rest == opening else None
                return self.thinking is not None
            self.thinking = rest.startswith(opening)
            return True
        if not self.thinking:
            self._held = self._held.lstrip() if self._gap else self._held
            if self._held:
                out.append(self._held)
                self._held, self._gap = "", False
            return False
        return self._in_thought(out) if self._has_begun else self._before_thought()

    def _before_thought(self) -> bool:
        self._held = self._held.lstrip()
        for at, mark in enumerate(self._expected):
            if self._held.startswith(mark):
                self._held, self._expected = self._held.removeprefix(mark), self._expected[at + 1 :]
                return True
        if not self._held or any(mark.startswith(self._held) for mark in self._expected):
            return False
        self._has_begun = True
        return True

    def _in_thought(self, out: list[str | Thought]) -> bool:
        closing = self._syntax.closing
        at = self._held.find(closing)
        end = len(self._held) - possible_prefix(self._held, closing) if at < 0 else at
        text = self._held[:end]
        if text := text[: max(len(text.rstrip()), len(text) - _MAX_GAP_CHARS)]:
            out.append(Thought(text))
        if at < 0:
            self._held = self._held[len(text) :]
            return False
        self._held, self.thinking, self._gap = self._held[at + len(closing) :], False, True
        return True

    def _channel_step(self, out: list[str | Thought]) -> bool:
        return self._in_channel(out) if self._in_message else self._in_header(out)

    def _in_header(self, out: list[str | Thought]) -> bool:
        begin = self._held.lstrip()
        if not begin and len(self._held) <= _MAX_HEADER_CHARS:
            return False
        at = self._held.find(_MESSAGE)
        is_header = any(begin.startswith(mark) or mark.startswith(begin) for mark in (_CHANNEL, _START))
        if not is_header or (at if at >= 0 else len(self._held)) > _MAX_HEADER_CHARS:
            self._in_message, self.thinking = True, False
            if begin.startswith(_START):  # text now, which else would be taken for the end of the message
                end = self._held.index(_START) + len(_START)
                out.append(self._held[:end])
                self._held, self._last = self._held[end:], str
            return True
        if at < 0:
            return False
        channel = self._held[:at].partition(_CHANNEL)[2].split(maxsplit=1)
        self._in_message, self.thinking = True, channel[:1] == [_THOUGHT_CHANNEL]
        self._held = self._held[at + len(_MESSAGE) :]
        self._gap = self._last is (Thought if self.thinking else str)
        return True

    def _in_channel(self, out: list[str | Thought]) -> bool:
        match = _END_OF_MESSAGE.search(self._held)
        end = match.start() if match else len(self._held) - max(possible_prefix(self._held, mark) for mark in _ENDS)
        if text := self._held[:end]:
            text = "\n" + text if self._gap else text
            self._gap, self._last = False, Thought if self.thinking else str
            out.append(Thought(text) if self.thinking else text)
        self._held = self._held[end:]
        if match is None:
            return False
        self._held = self._held if match[0] == _START else self._held.removeprefix(match[0])
        self._in_message, self.thinking = False, None
        return True


# --- grammars ---------------------------------------------------------------------------------------------------------


def after_reasoning(
    wanted: ResponseFormat,
    reader: ReasoningReader,
    syntax: ReasoningSyntax,
    token_id: Callable[[str], int | None],
    end_ids: Collection[int],
) -> ResponseFormat:
    """A grammar of reasoning, which may be any text, and then an answer in the wanted format.

    ``reader`` is a new one for the prompt. ``token_id`` finds the token of a mark; ``end_ids`` end an answer.
    """
    if reader.thinking is False:
        return wanted
    if wanted.grammar is Grammar.LARK:
        rules = wanted.schema
    else:
        rules = f"start: %json {json.dumps({**schema_of(wanted), 'x-guidance': JSON_OVERRIDES})}\n"

    def mark(text: str) -> str:
        known = token_id(text)
        return json.dumps(text, ensure_ascii=False) if known is None else f"<[{known}]>"

    closing = token_id(syntax.closing)
    thought = f"thought[suffix={json.dumps(syntax.closing, ensure_ascii=False)}]: /(.|\\n)*/"
    if closing is not None:
        others = ",".join(map(str, sorted({closing, *end_ids})))
        thought = f"thought: (<[^{others}]>)* <[{closing}]>"
    gap = r"gap: /[ \t\r\n]{0,8}/"
    if syntax.has_channels:
        header = f'{mark(_CHANNEL)} "{_THOUGHT_CHANNEL}" {mark(_MESSAGE)}'
        last = f'{mark(_CHANNEL)} "{_ANSWER_CHANNEL}" {mark(_MESSAGE)}'
        before = f'({header} thought {mark(_START)} "assistant")* {last}'
    elif reader.thinking:
        before = "thought gap"
    else:
        before = f"(gap {mark(syntax.opening)} thought gap)?"
    answer = rules.removeprefix("start:")
    lines = [f"start: {before} answer", f"answer:{answer.rstrip()}", thought, *([] if syntax.has_channels else [gap])]
    return ResponseFormat(Grammar.LARK, "\n".join(lines) + "\n")
