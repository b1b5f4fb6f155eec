import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triptych.domain.tenant import Tenant
from triptych.errors import InvalidRequest, RateLimited, Unauthenticated
from triptych.services.gateway.keys import (
    MAX_FAILURES,
    Caller,
    Failures,
    KeyEntry,
    KeyRing,
    key_digest,
    new_key,
    read_key_file,
)

ROOT = Path(__file__).parents[4]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def ring(clock: Clock, **limits: Any) -> tuple[KeyRing, str]:
    key, _ = new_key("alice")
    other, _ = new_key("bob")
    entries = {
        "alice": KeyEntry(sha256=key_digest(key).hex(), **limits),
        "bob": KeyEntry(sha256=key_digest(other).hex()),
    }
    return KeyRing(entries, clock), key


def test_a_key_names_its_holder() -> None:
    keys, key = ring(Clock())
    assert keys.caller([f"Bearer {key}"], "s").name == "alice"
    assert keys.caller([f"bearer  {key} "], "s").name == "alice"
    assert keys.caller([f"Bearer {key}"], "s") is keys.caller([f"Bearer {key}"], "s")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        ["{key}"],
        ["Basic {key}"],
        ["Bearer {key}x"],
        ["Bearer {key}", "Bearer {key}"],
        ["Bearer {key} {key}"],
        ["Bearer \udcff"],
        ["Bearer " + "x" * 10_000],
    ],
    ids=str,
)
def test_a_request_without_a_valid_key_is_refused(headers: list[str]) -> None:
    keys, key = ring(Clock())
    with pytest.raises(Unauthenticated, match=r"'Authorization: Bearer KEY' or 'x-api-key: KEY'"):
        keys.caller([header.replace("{key}", key) for header in headers], "s")


def test_without_a_key_file_every_request_is_accepted() -> None:
    keys = KeyRing.load(None, Clock())
    assert keys.caller([], "s").name == ""
    with keys.caller([], "s").request():
        pass


def test_ten_failures_a_minute_block_a_source() -> None:
    clock = Clock()
    keys, key = ring(clock)
    for _ in range(MAX_FAILURES):
        with pytest.raises(Unauthenticated):
            keys.caller(["Bearer x"], "bad")
        clock.now_s += 1
    with pytest.raises(RateLimited) as caught:
        keys.caller(["Bearer x"], "bad")
    assert caught.value.retry_after_s == 50
    assert keys.caller([f"Bearer {key}"], "bad").name == "alice", "a valid key is not affected"
    with pytest.raises(Unauthenticated):
        keys.caller(["Bearer x"], "other")
    clock.now_s += 51
    with pytest.raises(Unauthenticated):
        keys.caller(["Bearer x"], "bad")


def test_failures_of_any_number_of_sources_take_bounded_memory() -> None:
    failures = Failures(Clock())
    for source in range(20_000):
        failures.add(str(source))
    assert len(failures._times) == 10_000


def test_requests_of_a_key_are_limited_per_minute() -> None:
    clock = Clock()
    keys, key = ring(clock, requests_per_minute=2)
    caller = keys.caller([f"Bearer {key}"], "s")
    for _ in range(2):
        with caller.request():
            pass
    with pytest.raises(RateLimited, match="no requests left") as caught, caller.request():
        pass
    assert caught.value.retry_after_s == pytest.approx(30)
    clock.now_s += 30
    with caller.request():
        pass


def test_tokens_of_a_key_are_limited_per_minute_and_overdrafts_delay_it() -> None:
    clock = Clock()
    keys, key = ring(clock, tokens_per_minute=60)
    caller = keys.caller([f"Bearer {key}"], "s")
    with caller.request():
        caller.charge(90)
    with pytest.raises(RateLimited, match="no tokens left") as caught, caller.request():
        pass
    assert caught.value.retry_after_s == pytest.approx(31)
    clock.now_s += 31.1
    with caller.request():
        pass


def test_those_that_are_refused_are_told_to_come_back_one_after_the_other() -> None:
    clock = Clock()
    keys, key = ring(clock, requests_per_minute=6)
    caller = keys.caller([f"Bearer {key}"], "s")
    waits: list[float] = []
    for number in range(20):
        try:
            with caller.request():
                assert number < 6
        except RateLimited as error:
            waits.append(error.retry_after_s or 0.0)
    assert waits[:4] == pytest.approx([10.0, 20.0, 30.0, 40.0])
    assert max(waits) == pytest.approx(70.0), "bounded"
    for wait_s in waits[:4]:
        clock.now_s = 100.0 + wait_s
        with caller.request():
            pass


def test_items_of_a_key_are_limited_per_minute() -> None:
    clock = Clock()
    keys, key = ring(clock, items_per_minute=10)
    caller = keys.caller([f"Bearer {key}"], "s")
    caller.take_items(7)
    caller.take_items(0)
    with pytest.raises(RateLimited, match="no items left") as caught:
        caller.take_items(4)
    assert caught.value.retry_after_s == pytest.approx(6.0)
    with pytest.raises(InvalidRequest, match=r"has 11 images.*10 per minute"):
        caller.take_items(11)
    clock.now_s += 6.0
    caller.take_items(4)


def test_a_key_may_be_kept_from_going_first() -> None:
    keys, key = ring(Clock(), least_priority=0)
    caller = keys.caller([f"Bearer {key}"], "s")
    caller.check_priority(0)
    with pytest.raises(InvalidRequest, match="priority is -1, this key may use 0 or more"):
        caller.check_priority(-1)


def test_what_is_left_of_the_limits_is_told_in_headers() -> None:
    clock = Clock()
    keys, key = ring(clock, requests_per_minute=60, tokens_per_minute=600)
    caller = keys.caller([f"Bearer {key}"], "s")
    with caller.request():
        caller.charge(700)
    assert dict(caller.headers()) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "70.000s",
    }
    assert not dict(KeyRing({}, clock).caller([], "s").headers())


def test_a_key_at_its_limit_is_told_how_long_its_requests_take() -> None:
    clock = Clock()
    keys, key = ring(clock, concurrent=2)
    caller = keys.caller([f"Bearer {key}"], "s")
    for _ in range(60):
        with caller.request():
            clock.now_s += 8.0
    with caller.request(), caller.request(), pytest.raises(RateLimited) as caught, caller.request():
        pass
    assert caught.value.retry_after_s == pytest.approx(4.0, rel=0.01)


def test_a_keys_weight_is_its_tenants() -> None:
    entry = KeyEntry(sha256="0" * 64, weight=2.5)
    assert Caller("a", entry, Clock()).tenant == Tenant("a", 2.5)
    for weight in (0.0, -1.0, 101.0, float("nan")):
        with pytest.raises(ValueError, match="weight"):
            KeyEntry(sha256="0" * 64, weight=weight)


def test_concurrent_requests_of_a_key_are_limited() -> None:
    keys, key = ring(Clock(), concurrent=1)
    caller = keys.caller([f"Bearer {key}"], "s")
    with caller.request(), pytest.raises(RateLimited, match="1 requests of this key"), caller.request():
        pass
    with caller.request():
        pass


def test_the_key_file_has_hashes_only(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    (key, lines), (_, more) = new_key("team.a"), new_key("b")
    path.write_text(lines + "requests_per_minute = 5\n" + more)
    entries = read_key_file(path)
    assert entries["team.a"] == KeyEntry(sha256=key_digest(key).hex(), requests_per_minute=5)
    assert key not in path.read_text()
    assert KeyRing.load(path, Clock()).caller([f"Bearer {key}"], "s").name == "team.a"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "keys"),
        ("[keys]", "keys"),
        ("[keys.a]\nsha256 = 'x'", r"keys\.a\.sha256"),
        ("[keys.a]\nkey = 'secret'", r"keys\.a"),
        ("[keys.a", "not TOML"),
        (f"[keys.'a b']\nsha256 = '{'0' * 64}'", "a key's name"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\n[keys.b]\nsha256 = '{'0' * 64}'", "same key"),
        (f"[keys.'']\nsha256 = '{'0' * 64}'", "a key's name"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\nconcurrent = 0", "concurrent"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\nconcurrent = true", "concurrent"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\nitems_per_minute = 1{'0' * 400}", "items_per_minute"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\nitems_per_minute = 1{'0' * 5000}", "keys.toml is not TOML"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\nleast_priority = 2147483648", "least_priority"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\nweight = nan", "weight"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\nweight = 101", "weight"),
        ("a = " + "[" * 100_000, "keys.toml is not TOML"),
        ("a = '\udcff'", "keys.toml is not UTF-8"),
    ],
)
def test_an_invalid_key_file_is_one_clear_message(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=says) as caught:
        KeyRing.load(path, Clock())
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="does not exist"):
        KeyRing.load(tmp_path / "missing", Clock())


@pytest.mark.slow
def test_the_command_prints_the_key_once_and_the_lines_for_the_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "triptych.services.gateway.keys", "new"]
    made = subprocess.run([*command, "ci"], cwd=ROOT, capture_output=True, text=True, check=True)
    (tmp_path / "keys.toml").write_text(made.stdout)
    keys = KeyRing.load(tmp_path / "keys.toml", Clock())
    assert keys.caller([f"Bearer {made.stderr.strip()}"], "s").name == "ci"
    assert made.stderr.strip() not in made.stdout
    for wrong in ([], ["a b"]):
        refused = subprocess.run([*command, *wrong], cwd=ROOT, capture_output=True, text=True, check=False)
        assert (refused.returncode, refused.stdout) == (2, "")
