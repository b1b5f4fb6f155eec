from pathlib import Path

import pytest

from triptych.runtime.settings import SettingsError
from triptych.services.encoder.settings import EncoderSettings


def test_only_the_model_is_required() -> None:
    assert EncoderSettings.load(["--model", "somewhere"], {}).batches.max_batch_items > 1


def test_every_setting_is_described() -> None:
    schema = EncoderSettings.model_json_schema()
    fields = [field for group in (schema, *schema["$defs"].values()) for field in group.get("properties", {}).items()]
    assert [name for name, field in fields if "description" not in field] == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--model", "m", "--host", "nowhere"],
        ["--model", "m", "--max-item-bytes", "100", "--max-received-bytes", "99"],
        ["--model", "m", "--max-item-bytes", str(64 << 20)],
        ["--model", "m", "--dtype", "int8"],
        ["--model", "m", "--max-batch-items", "0"],
    ],
)
def test_invalid_settings_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SettingsError):
        EncoderSettings.load(arguments, {})


def test_the_arguments_of_vllm_come_with_its_engine() -> None:
    settings = EncoderSettings.load(
        ["--model", "m", "--engine", "vllm", "--vllm-args=--mm-encoder-attn-backend TORCH_SDPA"], {}
    )
    assert (settings.engine.engine, settings.engine.vllm_args) == ("vllm", "--mm-encoder-attn-backend TORCH_SDPA")
    assert EncoderSettings.load(["--model", "m"], {"TRIPTYCH_ENCODER_ENGINE": "vllm"}).engine.engine == "vllm"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vllm-args=--quantization fp8"], "vllm_args is for engine vllm, the engine is triptych"),
        (["--engine", "vllm", "--delay-profile", "somewhere"], "cannot have a delay_profile"),
        (["--engine", "vllm", "--device", "cuda:1"], "CUDA_VISIBLE_DEVICES"),
        (["--engine", "sglang"], "triptych"),
    ],
)
def test_options_of_one_engine_are_refused_with_another(arguments: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        EncoderSettings.load(["--model", "m", *arguments], {})


def test_files_of_embeddings_need_a_directory_and_a_bound() -> None:
    told = ["--model", "m", "--embedding-files", "kept", "--embedding-files-bytes", "1000"]
    settings = EncoderSettings.load(told, {})
    assert (settings.embedding_files, settings.embedding_files_bytes) == (Path("kept"), 1000)
    assert EncoderSettings.load(["--model", "m"], {}).embedding_files is None
    for half in (told[:4], [*told[:2], *told[4:]]):
        with pytest.raises(SettingsError, match="belong together"):
            EncoderSettings.load(half, {})
