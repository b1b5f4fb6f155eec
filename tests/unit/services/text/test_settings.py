"""What the text instance's settings refuse, and that every one of them is described."""

import pytest

from services.text.settings import TextSettings
from triptych.runtime.settings import SettingsError


def test_defaults_need_nothing_but_the_model() -> None:
    settings = TextSettings.load(["--model", "somewhere", "--encoders", "a:1,b:2"], {})
    assert settings.encoders == ("a:1", "b:2")


def test_every_setting_is_described() -> None:
    assert [name for name, field in TextSettings.model_fields.items() if not field.description] == []


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
def test_what_cannot_work_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SettingsError):
        TextSettings.load(arguments, {})


def test_whoever_encodes_needs_no_other_encoder_but_may_be_told_of_some() -> None:
    assert TextSettings.load(["--model", "m"], {}).encoders == ("127.0.0.1:50061",)
    assert TextSettings.load(["--model", "m", "--role", "EPD"], {}).encoders == ()
    assert TextSettings.load(["--model", "m", "--encoders", "a:1"], {"TRIPTYCH_TEXT_ROLE": "EPD"}).encoders == ("a:1",)


@pytest.mark.parametrize("role", ["EP", "ED", "E", "P", "D", "epd", ""])
def test_roles_that_are_not_there_are_refused_by_name(role: str) -> None:
    with pytest.raises(SettingsError, match=f"{role} is not among PD and EPD|Input should be"):
        TextSettings.load(["--model", "m", "--role", role], {})


def test_an_encoder_is_mounted_only_where_it_encodes() -> None:
    with pytest.raises(SettingsError, match="mount_encoder is for role EPD, the role is PD"):
        TextSettings.load(["--model", "m", "--mount-encoder=--arena-bytes 9999999"], {})
