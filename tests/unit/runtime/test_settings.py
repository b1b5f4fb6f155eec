import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import Field, ValidationError

from triptych.rpc import settings as settings_module
from triptych.rpc.settings import RpcServiceSettings
from triptych.runtime.settings import (
    ServiceSettings,
    SettingsError,
    Strings,
    load_or_exit,
    service_config,
)


@dataclass(frozen=True, slots=True)
class LockLimits:
    """A group of settings, declared by the module that uses it."""

    max_turns: int = 2
    """Most turns of the key."""
    grace_s: float = 0.5
    spares: tuple[int, ...] = (7,)

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns is {self.max_turns}, it has to be at least 1")


class DoorSettings(ServiceSettings):
    model_config = service_config("door")

    port: int = Field(default=1, ge=0, le=65535)
    """The port."""
    peers: Strings = ()
    wide: bool = False
    lock: LockLimits = LockLimits()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "door.toml"
    path.write_text('port = 2\npeers = ["file"]\n')
    return path


def test_defaults_are_declared_in_the_class() -> None:
    assert DoorSettings.load([], {}).port == 1


def test_the_command_line_overrides_the_environment_the_file_and_the_default(config: Path) -> None:
    file = ["--config", str(config)]
    assert DoorSettings.load(file, {}).port == 2
    assert DoorSettings.load(file, {"TRIPTYCH_DOOR_PORT": "3"}).port == 3
    assert DoorSettings.load([*file, "--port", "4"], {"TRIPTYCH_DOOR_PORT": "3"}).port == 4


def test_lists_are_separated_by_commas_in_every_source(config: Path) -> None:
    assert DoorSettings.load(["--peers", "a,b"], {}).peers == ("a", "b")
    assert DoorSettings.load([], {"TRIPTYCH_DOOR_PEERS": "a, b"}).peers == ("a", "b")
    assert DoorSettings.load([f"--config={config}"], {}).peers == ("file",)


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (
            [],
            {"TRIPTYCH_DOOR_PROT": "3"},
            "unknown environment variable TRIPTYCH_DOOR_PROT; did you mean TRIPTYCH_DOOR_PORT",
        ),
        ([], {"TRIPTYCH_DOOR_PORT": "many"}, "port: Input should be a valid integer"),
        (["--port", "70000"], {}, "port: Input should be less than or equal to 65535"),
        (["--config", "nowhere.toml"], {}, "nowhere.toml does not exist"),
        (["--config"], {}, "--config needs a file"),
        (["--max-turns", "0"], {}, "lock: Value error, max_turns is 0"),
        (["--max-turns", "many"], {}, "lock.max_turns: Input should be a valid integer"),
        ([], {"TRIPTYCH_DOOR_LOCK": "{}"}, "unknown environment variable TRIPTYCH_DOOR_LOCK"),
    ],
)
def test_an_invalid_value_is_named(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        DoorSettings.load(argv, environ)


def test_unknown_keys_of_a_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "door.toml"
    path.write_text("prot = 2\n")
    with pytest.raises(SettingsError, match="prot: Extra inputs are not permitted"):
        DoorSettings.load(["--config", str(path)], {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_turns = 3", r"max_turns belongs in the table \[lock\]"),
        ("[lock]\nturns = 3", "lock.turns: Unexpected keyword argument"),
        ("lock = 3", "lock: Input should be"),
    ],
)
def test_a_group_is_a_table_of_the_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "door.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=said):
        DoorSettings.load(["--config", str(path)], {})


def test_settings_of_a_group_have_their_own_names_in_every_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "door.toml"
    path.write_text("[lock]\nmax_turns = 3\ngrace_s = 9\n")
    file = ["--config", str(path)]
    assert DoorSettings.load([], {}).lock == LockLimits()
    assert DoorSettings.load(file, {}).lock == LockLimits(3, 9.0)
    assert DoorSettings.load(file, {"TRIPTYCH_DOOR_MAX_TURNS": "4"}).lock == LockLimits(4, 9.0)
    assert DoorSettings.load([*file, "--max-turns", "5"], {"TRIPTYCH_DOOR_MAX_TURNS": "4"}).lock == LockLimits(5, 9.0)
    assert DoorSettings.load(["--spares", "1,2"], {}).lock.spares == (1, 2)
    assert DoorSettings.load([], {"TRIPTYCH_DOOR_SPARES": "3, 4"}).lock.spares == (3, 4)
    with pytest.raises(SystemExit):
        DoorSettings.load(["--grace-s", "7", "--print-config"], {})
    assert json.loads(capsys.readouterr().out)["lock"] == {"max_turns": 2, "grace_s": 7.0, "spares": [7]}
    with pytest.raises(SystemExit):
        DoorSettings.load(["--help"], {})
    assert "Most turns of the key. (default: 2)" in capsys.readouterr().out


def test_an_invalid_toml_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "door.toml"
    path.write_text("= 2\n")
    with pytest.raises(SettingsError, match="is not TOML"):
        DoorSettings.load(["--config", str(path)], {})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prot", "2"], "unrecognized arguments: --prot 2; did you mean --port? (--help lists all settings)"),
        (["--prot=2"], "unrecognized arguments: --prot=2; did you mean --port? (--help lists all settings)"),
        (["--port", "2", "--zzz"], "unrecognized arguments: --zzz (--help lists all settings)"),
        (["stray"], "unrecognized arguments: stray (--help lists all settings)"),
        (["--port"], "argument --port: expected one argument (--help lists all settings)"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        load_or_exit(DoorSettings, arguments)
    assert (stop.value.code, capsys.readouterr().err) == (2, f"triptych.services.door: {said}\n")


def test_print_config_prints_all_settings_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        DoorSettings.load(["--print-config", "--port", "4"], {})
    assert stop.value.code == 0
    assert DoorSettings.model_validate_json(capsys.readouterr().out).port == 4


def test_invalid_settings_are_one_message_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load_or_exit(DoorSettings, ["--port", "many"])
    assert stop.value.code == 2
    assert "triptych.services.door: invalid configuration" in capsys.readouterr().err


def test_settings_are_frozen() -> None:
    settings = DoorSettings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.port = 3


def test_direct_construction_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_DOOR_PORT", "9")
    assert DoorSettings().port == 1


class ShedSettings(RpcServiceSettings):
    model_config = service_config("shed")

    port: int = 1


def test_a_container_listens_on_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "own_address", lambda: "172.18.0.7")
    assert ShedSettings.load(["--host", "auto", "--allow-network"], {}).host == "172.18.0.7"
    with pytest.raises(SettingsError, match=r"host 172\.18\.0\.7 is not a loopback address: configure TLS"):
        ShedSettings.load(["--host", "auto"], {})


def test_a_machine_whose_name_has_no_address_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(settings_module, "own_address", unknown)
    with pytest.raises(SettingsError, match=r"host: .*this machine's name has no address"):
        ShedSettings.load(["--host", "auto"], {})
