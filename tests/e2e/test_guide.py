"""The commands of the guides and the README work as described, against a cluster started by ``triptych up``.

Each ``sh`` block is run by bash from the root of the checkout, unless a comment above it says why not. A ``text`` block
right after it has lines of its output, where ``...`` matches anything.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = ("README.md", "docs/guide.md", "docs/cli.md")
_BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^\n]+ -->\n)?^```sh\n(?P<commands>.*?)^```\n(?:\n^```text\n(?P<said>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
START_S = 300


@dataclass(frozen=True)
class Block:
    guide: str
    line: int
    commands: str
    said: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.guide}:{self.line}"


def _line(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1


def blocks() -> list[Block]:
    found = []
    for guide in GUIDES:
        text = (ROOT / guide).read_text()
        for match in _BLOCK.finditer(text):
            if not match["skip"]:
                said = tuple((match["said"] or "").splitlines())
                found.append(Block(guide, _line(text, match), match["commands"], said))
    return found


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """``triptych up`` on free ports, with replacements for the guides' addresses."""
    log = tmp_path_factory.mktemp("up") / "up.log"
    command = [sys.executable, "-m", "triptych.cli", "up", "--port", "0", "--router-port", "0", "--no-live"]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT) as process:
        try:
            yield _addresses(process, log)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(240) == 0, log.read_text()


def _addresses(process: "subprocess.Popen[bytes]", log: Path) -> dict[str, str]:
    for _ in range(START_S * 10):
        said = log.read_text()
        url = re.search(r"ready in .* at http://(\S+)", said)
        router = re.search(r"gRPC, for the SDK, at (\S+)", said)
        if url and router:
            return {"127.0.0.1:8000": url[1], "127.0.0.1:50051": router[1]}
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        break
    raise AssertionError(f"triptych up did not come up:\n{log.read_text()}")


def here(text: str, addresses: dict[str, str]) -> str:
    for usual, actual in addresses.items():
        text = text.replace(usual, actual)
    return text


@pytest.mark.parametrize("block", blocks(), ids=str)
def test_commands_of_the_guides_work(block: Block, addresses: dict[str, str]) -> None:
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
        "HOME": os.path.expanduser("~"),  # noqa: PTH111  # as a string, as the environment has it
        "LANG": "C.UTF-8",
        "COLUMNS": "120",
        "TRIPTYCH_URL": f"http://{addresses['127.0.0.1:8000']}",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", here(block.commands, addresses)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    for line in block.said:
        pattern = ".*".join(map(re.escape, here(line, addresses).split("...")))
        assert re.search(pattern, done.stdout), f"{line!r} is not in:\n{done.stdout}"


def snippets() -> list[Any]:
    found = []
    for guide in ("README.md", "docs/sdk.md"):
        text = (ROOT / guide).read_text()
        matches = re.finditer(r"^```python\n(.*?)^```\n", text, re.MULTILINE | re.DOTALL)
        found += [pytest.param(match[1], id=f"{guide}:{_line(text, match)}") for match in matches]
    return found


@pytest.mark.parametrize("snippet", snippets())
def test_python_of_the_guides_runs(snippet: str, addresses: dict[str, str]) -> None:
    """Each block runs unchanged from the root of a checkout, with an SDK ``client`` where the text has one."""
    before = 'from triptych import Client\n\nclient = Client("127.0.0.1:50051")\n'
    done = subprocess.run(
        [sys.executable, "-c", here(before + snippet, addresses)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_guide_has_tested_commands() -> None:
    assert {block.guide for block in blocks()} == set(GUIDES)
