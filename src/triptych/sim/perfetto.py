"""The spans of a run as a trace that Perfetto and Chrome open (the JSON trace event format)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from .outcome import Busy, Outcome

_LANES: tuple[Busy, ...] = get_args(Busy)


def write(path: Path, outcome: Outcome) -> None:
    """One process per instance, one thread per kind of work. Raises OSError."""
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(_events(outcome)):
            file.write(f"{',' if number else ''}{json.dumps(event)}\n")
        file.write("]}\n")


def _events(outcome: Outcome) -> Iterator[dict[str, Any]]:
    numbers = {use.name: number for number, use in enumerate(outcome.instances, start=1)}
    for use in outcome.instances:
        number = numbers[use.name]
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"{use.name} ({use.role})"}}
        for lane, work in enumerate(_LANES):
            yield {"ph": "M", "name": "thread_name", "pid": number, "tid": lane, "args": {"name": work}}
    for span in outcome.spans:
        yield {
            "ph": "X",
            "name": f"{span.work} {span.size}",
            "cat": span.work,
            "pid": numbers.get(span.instance, 0),
            "tid": _LANES.index(span.work),
            "ts": round(1e6 * span.start_s, 3),
            "dur": round(1e6 * (span.end_s - span.start_s), 3),
        }
    for decision in outcome.decisions:
        yield {"ph": "i", "s": "g", "name": decision.text, "pid": 0, "tid": 0, "ts": round(1e6 * decision.at_s, 3)}
    for sample in outcome.samples:
        yield {"ph": "C", "name": "pending", "pid": 0, "ts": round(1e6 * sample.at_s, 3), "args": dict(sample.pending)}
