import pytest

from services.text.settings import TextSettings
from triptych.domain.stage import Role
from triptych.runtime.settings import SettingsError


def test_only_the_model_is_required() -> None:
    settings = TextSettings.load(["--model", "somewhere"], {})
    assert settings.role is Role.PD


def test_every_setting_is_described() -> None:
    schema = TextSettings.model_json_schema()
    fields = [field for group in (schema, *schema["$defs"].values()) for field in group.get("properties", {}).items()]
    assert [name for name, field in fields if "description" not in field] == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--model", "m", "--host", "nowhere"],
        ["--model", "m", "--max-sequences", "64", "--token-budget", "32"],
        ["--model", "m", "--image-cache-bytes", "1"],
        ["--model", "m", "--encode-patience-s", "-1"],
    ],
)
def test_invalid_settings_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SettingsError):
        TextSettings.load(arguments, {})


@pytest.mark.parametrize("role", ["EP", "ED", "E", "P", "D", "epd", ""])
def test_unknown_roles_are_refused_by_name(role: str) -> None:
    with pytest.raises(SettingsError, match=f"{role} is neither PD nor EPD|Input should be"):
        TextSettings.load(["--model", "m", "--role", role], {})


def test_an_encoder_is_mounted_only_in_roles_that_encode() -> None:
    with pytest.raises(SettingsError, match="mount_encoder is for role EPD, the role is PD"):
        TextSettings.load(["--model", "m", "--mount-encoder=--arena-bytes 9999999"], {})
