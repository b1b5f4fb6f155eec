"""Separates the calls of tools from an answer's text, while it arrives."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.tokens.call_arguments import (
    ArgumentsReader,
    JsonReader,
    Marks,
    Matched,
    end_of_space,
    is_object,
    read_json,
    reader_of,
)
from triptych.tokens.tool_calls import CallSyntax, Json, possible_prefix

_MAX_GAP_CHARS = 256
"""White space next to a call. More is text: what is held must be bounded."""
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallBegun:
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments, which are a JSON object together, of the call that has begun last."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """``is_whole``: the arguments are a JSON object. ``text`` is what the model wrote."""

    is_whole: bool
    text: str


Part = str | CallBegun | Arguments | CallEnded


class CallReader:
    """Reads one answer, however it is chunked.

    A call begins with its name; its arguments follow in pieces. What only looked like a call is text, unchanged; white
    space next to a call is dropped. Only text that may still become a call is held back.
    """

    def __init__(self, syntax: CallSyntax, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """``tools``: the JSON Schema of each one's parameters, by name."""
        self._syntax = syntax
        self._tools = tools
        is_json = isinstance(syntax.arguments, Json)
        self._heads = [Marks(head + "{" * is_json) for head in syntax.heads]
        self._unread = len("{") if is_json else 0
        """How much of a head belongs to the arguments."""
        self._first, self._tail, self._closing = Marks(syntax.first), Marks(syntax.tail), Marks(syntax.closing)
        self._separators = _SPACE + syntax.between
        self._step = self._in_text if syntax.opening else self._at_start
        """Processes one element at the start of the held text. Returns whether to go on."""
        self._held = ""
        self._raw: list[str] = []
        """What was taken for the call that has not ended."""
        self._reader: ArgumentsReader = JsonReader()
        self._written: list[str] = []
        """The arguments, or the object that has a call in it."""
        self._has_called = False

    def feed(self, text: str) -> list[Part]:
        """Parts that this piece completes, in order."""
        self._held += text
        out: list[Part] = []
        while self._step(out):
            pass
        return out

    def flush(self) -> list[Part]:
        """The rest, at the end of the answer."""
        text, self._held, self._raw = "".join((*self._raw, self._held)), "", []
        if self._step in (self._in_arguments, self._in_rest):
            return [CallEnded(False, text)]
        return [text] if text and not (self._has_called and not text.strip(self._separators)) else []

    def _in_text(self, out: list[Part]) -> bool:
        opening = self._syntax.opening
        at = self._held.find(opening)
        text = self._held[: at if at >= 0 else len(self._held) - possible_prefix(self._held, opening)]
        text = text[: max(len(text.rstrip()), len(text) - _MAX_GAP_CHARS)]
        _append_text(out, text)
        if at < 0:
            self._held = self._held[len(text) :]
            return False
        self._take(len(text), at + len(opening))
        self._step = self._at_first
        return True

    def _at_start(self, out: list[Part]) -> bool:
        """Before a call without a mark."""
        del out
        gap = len(self._held) - len(self._held.lstrip())
        if gap == len(self._held) and gap <= _MAX_GAP_CHARS:
            return False
        if gap > _MAX_GAP_CHARS:
            self._step = self._in_plain
        else:
            self._take(0, gap)
            self._step = self._at_first
        return True

    def _at_first(self, out: list[Part]) -> bool:
        """Before the first call between two marks."""
        first = self._first.match(self._held)
        if isinstance(first, Matched):
            return self._at_call(out, first.end)
        return first is False and self._no_call(out)

    def _at_call(self, out: list[Part], at: int) -> bool:
        """Before what may be a call, from this position on."""
        found = [head.match(self._held, at) for head in self._heads]
        head = next((head for head in found if isinstance(head, Matched)), None)
        if head is not None:
            if self._syntax.needs_names and head.name not in self._tools:
                return self._no_call(out)
            self._take(0, head.end - self._unread)
            self._reader = reader_of(self._syntax.arguments, self._tools.get(head.name, {}))
            self._written, self._step = [], self._in_arguments
            out.append(CallBegun(head.name))
            return True
        if None in found:
            return False
        start = end_of_space(self._held, at)
        if not self._syntax.envelope or not self._held.startswith("{", start):
            return self._no_call(out)
        self._take(0, start)
        self._reader, self._written, self._step = JsonReader(), [], self._in_object
        return True

    def _no_call(self, out: list[Part]) -> bool:
        _append_text(out, "".join(self._raw))
        self._raw = []
        self._step = self._in_text if self._syntax.opening else self._in_plain
        return True

    def _in_arguments(self, out: list[Part]) -> bool:
        written, ended = self._read()
        if written:
            out.append(Arguments(written))
            self._written.append(written)
        if not ended:
            return ended is False and self._end(out, is_whole=False)
        is_whole = is_object("".join(self._written))
        if not self._syntax.envelope or not is_whole:
            return self._end(out, is_whole=is_whole)
        self._reader, self._written, self._step = JsonReader(depth=1), ['{"":0'], self._in_rest
        return True

    def _in_rest(self, out: list[Part]) -> bool:
        """After the arguments, in the object around them."""
        written, ended = self._read()
        self._written.append(written)
        return ended is True and self._end(out, is_whole=is_object("".join(self._written)))

    def _in_object(self, out: list[Part]) -> bool:
        """In an object that has a call in another form than the usual one."""
        written, ended = self._read()
        self._written.append(written)
        if not ended:
            return False
        call = self._call_in("".join(self._written))
        if call is None:
            # Not scanned again: nested marks and braces would cost quadratic time.
            return self._no_call(out)
        name, arguments = call
        out += (CallBegun(name), Arguments(arguments))
        return self._end(out, is_whole=True)

    def _end(self, out: list[Part], *, is_whole: bool) -> bool:
        out.append(CallEnded(is_whole, "".join(self._raw)))
        self._raw = []
        if not is_whole:
            return self._no_call(out)
        self._has_called = True
        self._step = self._at_tail
        return True

    def _at_tail(self, out: list[Part]) -> bool:
        del out
        tail = self._tail.match(self._held)
        if tail is None:
            return False
        self._held = self._held[tail.end :] if isinstance(tail, Matched) else self._held
        self._step = self._after_call
        return True

    def _after_call(self, out: list[Part]) -> bool:
        gap = len(self._held) - len(self._held.lstrip(self._separators))
        if gap > _MAX_GAP_CHARS:
            return self._no_call(out)
        closing = self._closing.match(self._held) if self._syntax.closing else False
        if isinstance(closing, Matched):
            self._held = self._held[closing.end :]
            return self._no_call(out)
        if not self._syntax.is_list:
            return closing is False and self._no_call(out)
        if gap == len(self._held) or closing is None:
            return False
        return self._at_call(out, gap)

    def _in_plain(self, out: list[Part]) -> bool:
        """After the last call of an answer whose calls have no mark."""
        _append_text(out, self._held)
        self._held = ""
        return False

    def _take(self, start: int, end: int) -> None:
        """Move held text to what belongs to a call."""
        self._raw.append(self._held[start:end])
        self._held = self._held[end:]

    def _read(self) -> tuple[str, bool | None]:
        """JSON that the held text completes, and how the reader has ended."""
        written, used = self._reader.feed(self._held)
        self._take(0, used)
        return written, self._reader.ended

    def _call_in(self, text: str) -> tuple[str, str] | None:
        """The name and the arguments in an object."""
        try:
            fields = read_json(text)
            name, arguments = fields.get("name"), fields.get(self._syntax.envelope, {})
            if not isinstance(name, str) or not name or not isinstance(arguments, dict):
                return None
            name.encode()
            written = json.dumps(arguments, ensure_ascii=False)
        except (ValueError, RecursionError):
            return None
        if self._syntax.needs_names and name not in self._tools:
            return None
        # A lone surrogate can be written only as an escape.
        return name, written if _is_unicode(written) else json.dumps(arguments)


def _append_text(out: list[Part], text: str) -> None:
    if text:
        out.append(text)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
