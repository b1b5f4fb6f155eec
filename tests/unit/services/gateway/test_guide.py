"""The examples of docs/rest.md are accepted by the gateway."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from triptych.media.fetch import FetchLimits
from triptych.media.remote_url import HostRules
from triptych.services.gateway.keys import read_key_file
from triptych.services.gateway.messages_api import parse_messages
from triptych.services.gateway.openai_api import parse_chat, parse_completion, parse_tokenize
from triptych.services.gateway.request_fields import ROWS
from triptych.services.gateway.response_store import StoreLimits
from triptych.services.gateway.responses_api import parse_responses
from triptych.services.gateway.settings import GatewaySettings

GUIDE = (Path(__file__).parents[4] / "docs" / "rest.md").read_text()
PARSERS = {
    "chat/completions": parse_chat,
    "v1/completions": parse_completion,
    "v1/responses": parse_responses,
    "v1/messages": parse_messages,
    "tokenize": parse_tokenize,
}


def bodies() -> list[tuple[str, str]]:
    """(the route that the section's title names, the body)."""
    found = []
    for section in re.split(r"^## ", GUIDE, flags=re.MULTILINE):
        route = next((name for name in PARSERS if name in section.splitlines()[0]), "")
        found += [(route, body) for body in re.findall(r"```json\n(.*?)```", section, re.DOTALL)]
    return found


@pytest.mark.parametrize(("route", "body"), bodies())
def test_every_body_in_the_guide_is_accepted(route: str, body: str) -> None:
    assert PARSERS[route](body.encode(), 1000)
    assert json.loads(body)


def test_there_is_a_body_for_every_route() -> None:
    assert {route for route, _ in bodies()} == set(PARSERS)


def test_the_key_file_in_the_guide_is_valid(tmp_path: Path) -> None:
    (lines,) = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "keys.toml").write_text(lines.replace('"..."', f'"{"0" * 64}"'))
    assert read_key_file(tmp_path / "keys.toml")["alice"].concurrent == 16


def test_every_setting_in_the_guide_exists() -> None:
    named = set(re.findall(r"`((?:fetch|max)_[a-z_]+)`", GUIDE)) - {row.name for row in ROWS}
    grouped = {field.name for group in (HostRules, FetchLimits, StoreLimits) for field in fields(group)}
    assert named - {"max_model_len"} <= grouped | set(GatewaySettings.model_fields)
