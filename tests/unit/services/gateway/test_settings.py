"""Settings of a gateway that go together."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from triptych.runtime.settings import SettingsError
from triptych.services.gateway.keys import new_key
from triptych.services.gateway.settings import GatewaySettings


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--router", "nowhere"], "nowhere.: it is not HOST:PORT"),
        (["--router", "a:1,a:1"], "from 1 to 64 routers, each once"),
        (["--router", ""], "from 1 to 64 routers"),
        (["--router", "a:1", "--pool-manager", "m:1"], "router and pool_manager both name routers"),
        (["--mount-router", "--model m", "--pool-manager", "m:1"], "mount_router and pool_manager both"),
    ],
)
def test_settings_name_routers_in_one_way(argv: Sequence[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        GatewaySettings.load(argv, {})


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/", "https://Chat.example", "https://*.example/x"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(SettingsError, match="is not an origin"):
        GatewaySettings.load(["--allowed-origins", origin], {})


def test_settings_are_printed_only_with_keys_that_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("[keys.a]\nsha256 = 'x'")
    argv = ["--keys", str(keys), "--print-config"]
    with pytest.raises(SettingsError, match=r"^keys: .*keys\.a\.sha256"):
        GatewaySettings.load(argv, {})
    assert capsys.readouterr().out == ""
    keys.write_text(new_key("a")[1])
    with pytest.raises(SystemExit) as exited:
        GatewaySettings.load(argv, {})
    assert exited.value.code == 0
    assert str(keys) in capsys.readouterr().out
