"""Whole calls, from the parts that a reader returns."""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.tokens.call_reader import Arguments, CallBegun, CallEnded, Part


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str
    is_whole: bool = True


def calls_of(parts: Sequence[Part]) -> list[str | Call]:
    """Texts and calls in order, with adjacent texts joined. One that has not ended counts as whole."""
    out: list[str | Call] = []
    for part in parts:
        last = out[-1] if out else None
        match part:
            case str() if isinstance(last, str):
                out[-1] = last + part
            case str():
                out.append(part)
            case CallBegun():
                out.append(Call(part.name, ""))
            case Arguments():
                assert isinstance(last, Call)
                assert part.text
                out[-1] = Call(last.name, last.arguments + part.text)
            case CallEnded():
                assert isinstance(last, Call)
                out[-1] = Call(last.name, last.arguments, part.is_whole)
    return out
