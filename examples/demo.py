"""`make demo`: a cluster of processes on this machine, questions about images over REST, and their timelines.

Two encoders, a router, a pool manager, a text process and a gateway serve the demo model. Answers to reading questions are checked
against the file names (`3_a.png` shows a 3), and the images of the largest request must be spread over both
encoders. The exit status is 0 only if all checks pass and no process is left running.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from triptych.cli import show
from triptych.cli.cluster import LocalCluster
from triptych.cli.outcome import CliError
from triptych.cli.rest import RestClient

DIGITS = Path(__file__).parent / "digits"
ENCODERS = 2
MAX_TOKENS = 96
RDMA = ("--transports", "nixl,tcp")
"""The transports between hosts: NIXL, or TCP where it is not installed. By default processes on one host map each
other's memory."""


@dataclass(frozen=True)
class Case:
    """A question about some of the digits, and how a correct answer ends (empty: any answer)."""

    question: str
    images: tuple[str, ...] = ()
    expected: str = ""
    strict: bool = False
    """Whether the demo fails on a different answer."""


def read(question: str, *images: str) -> Case:
    """A reading question: the answer is in the file names."""
    return Case(question, images, " ".join(name[0] for name in images), strict=True)


CASES = (
    read("What digits are shown?", "3_a", "1_a", "4_a"),
    read("Read the digits in order.", "2_a", "7_a", "1_b", "8_a", "2_b", "8_b", "1_c", "9_a"),
    Case("Which is the largest digit?", ("5_a", "9_b", "2_c"), "The largest digit is 9."),
    Case("What is the smallest digit?", ("6_a", "4_b", "8_c", "5_b"), "The smallest digit is 4."),
    Case("How many images are there?", ("0_a", "0_b", "6_b", "7_b", "3_b"), "There are 5 images."),
    Case("What is the sum of the digits?", ("4_c", "5_c"), "The sum is 9."),
    Case("Who are you?"),
)


async def main() -> int:
    console = show.plain_console()
    console.print("Starting 1 gateway, 1 router, 1 pool manager, 2 encoders and 1 text process ...")
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with LocalCluster("demo", roles=f"E:{ENCODERS},PD:1", options={"encoder": RDMA, "text": RDMA}) as cluster:
        pids = dict(cluster.processes)
        for name, pid in pids.items():
            console.print(f"  {name:<12} pid {pid:<8} {cluster.targets[name]}")
        console.print(f"Ready after {loop.time() - began_s:.1f} s at {cluster.url}\n")
        async with RestClient(cluster.url) as client:
            model = await client.first_model()
            backends: set[str] = set()
            mistakes = [mistake for case in CASES for mistake in await ask(client, model, case, console, backends)]
    mistakes += [f"{name} (pid {pid}) is still running" for name, pid in pids.items() if is_running(pid)]
    console.print(Rule(style="dim"))
    console.print(
        f"Embeddings were pulled over {', '.join(sorted(backends))}: the demo uses the transports between hosts. "
        "`triptych up` uses shm by default: processes on one machine map each other's memory.",
        soft_wrap=True,
    )
    for mistake in mistakes:
        console.print(f"WRONG: {mistake}", style="bold red")
    if not mistakes:
        console.print(
            f"All answers are correct, both encoders were used, and all {len(pids)} processes have ended, "
            f"after {loop.time() - began_s:.1f} s.",
            style="bold green",
        )
    return 1 if mistakes else 0


async def ask(client: RestClient, model: str, case: Case, console: Console, backends: set[str]) -> list[str]:
    """Ask one question, stream its answer and show where it was computed. Returns the mistakes.

    Adds the transports of the pulls to ``backends``.
    """
    console.print(Rule(style="dim"))
    console.print(
        Text(case.question, style="bold"), Text("  ".join(f"{name}.png" for name in case.images), style="dim")
    )
    console.print("> ", end="")
    said = ""
    paths = [DIGITS / f"{name}.png" for name in case.images]
    async with client.ask(case.question, paths, model=model, max_tokens=MAX_TOKENS) as answer:
        async for text in answer.texts():
            said += text
            console.print(text, end="", style="bold cyan", soft_wrap=True)
    right = said.strip().endswith(case.expected)
    console.print("" if not case.expected else "  ✓" if right else f"  ✗ expected: {case.expected}")
    timeline = await client.timeline(answer.request_id)
    console.print(show.timeline(timeline))
    backends.update(item["pull_backend"] for item in timeline["items"] if not item["text_cached"])
    console.print()
    mistakes = [f"{case.question} {said!r}, not {case.expected!r}"] if case.strict and not right else []
    return mistakes + misplaced(case, timeline["items"])


def misplaced(case: Case, items: Sequence[Mapping[str, Any]]) -> list[str]:
    """Mistakes in the timeline: an image that no encoder served, or one encoder that served all images."""
    mistakes = [
        f"{case.question} image {item['item'] + 1} was not pulled from an encoder"
        for item in items
        if not item["encoder"] or not (item["text_cached"] or item["pull_bytes"])
    ]
    if len(items) != len(case.images):
        mistakes.append(f"{case.question} {len(case.images)} images were sent, the timeline has {len(items)}")
    encoders = {item["encoder"] for item in items}
    if len(case.images) == max(len(other.images) for other in CASES) and len(encoders) != ENCODERS:
        mistakes.append(f"{case.question} all images went to {', '.join(encoders)}")
    return mistakes


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except CliError as error:
        sys.exit(f"demo: {error}")
