"""What the encoder's settings refuse, and that every one of them is described."""

import pytest

from services.encoder.settings import EncoderSettings
from triptych.runtime.settings import SettingsError


def test_defaults_need_nothing_but_the_model() -> None:
    assert EncoderSettings.load(["--model", "somewhere"], {}).max_batch_items > 1


def test_every_setting_is_described() -> None:
    assert [name for name, field in EncoderSettings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--model", "m", "--host", "nowhere"],
        ["--model", "m", "--max-item-bytes", "100", "--max-received-bytes", "99"],
        ["--model", "m", "--max-item-bytes", str(64 << 20)],
        ["--model", "m", "--dtype", "int8"],
    ],
)
def test_what_cannot_work_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SettingsError):
        EncoderSettings.load(arguments, {})
