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
    ],
)
def test_what_cannot_work_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SettingsError):
        TextSettings.load(arguments, {})
