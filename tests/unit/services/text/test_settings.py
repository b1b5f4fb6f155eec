from pathlib import Path

import pytest

from triptych.domain.stage import Role
from triptych.runtime.settings import SettingsError
from triptych.services.text.settings import TextSettings


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


@pytest.mark.parametrize("role", ["P", "D", "PD", "EP", "ED", "EPD"])
def test_roles_with_a_stage_of_text_are_taken(role: str) -> None:
    assert TextSettings.load(["--model", "m", "--role", role], {}).role is Role(role)


@pytest.mark.parametrize(
    ("role", "said"), [("E", "run triptych.services.encoder"), ("epd", "Input should be"), ("", "Input")]
)
def test_other_roles_are_refused_by_name(role: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        TextSettings.load(["--model", "m", "--role", role], {})


def test_role_e_is_for_one_that_can_switch_to_a_stage_of_text() -> None:
    assert TextSettings.load(["--model", "m", "--role", "E", "--switchable", "ED"], {}).role is Role.E
    with pytest.raises(SettingsError, match=r"run triptych\.services"):
        TextSettings.load(["--model", "m", "--role", "E", "--switchable", "E"], {})


def test_an_arena_for_keys_and_values_has_room_or_is_none() -> None:
    assert TextSettings.load(["--model", "m", "--kv-arena-bytes", "0"], {}).kv_arena_bytes == 0
    with pytest.raises(SettingsError, match="more than 4096 bytes, or 0"):
        TextSettings.load(["--model", "m", "--kv-arena-bytes", "1000"], {})


def test_an_encoder_is_mounted_only_in_roles_that_encode() -> None:
    with pytest.raises(SettingsError, match="mount_encoder is for roles EP, ED and EPD, the role is PD"):
        TextSettings.load(["--model", "m", "--mount-encoder=--arena-bytes 9999999"], {})


def test_the_arguments_of_vllm_come_with_its_engine() -> None:
    settings = TextSettings.load(["--model", "m", "--engine", "vllm", "--vllm-args=--max-model-len 512"], {})
    assert (settings.engine.engine, settings.engine.vllm_args) == ("vllm", "--max-model-len 512")
    by_environment = TextSettings.load(["--model", "m"], {"TRIPTYCH_TEXT_ENGINE": "vllm"})
    assert by_environment.engine.engine == "vllm"


def test_a_file_has_the_engine_in_its_table(tmp_path: Path) -> None:
    file = tmp_path / "text.toml"
    file.write_text('model = "m"\n[engine]\nengine = "vllm"\nvllm_args = "--enforce-eager"\n')
    assert TextSettings.load(["--config", str(file)], {}).engine.vllm_args == "--enforce-eager"
    file.write_text('model = "m"\nengine = "vllm"\n')
    with pytest.raises(SettingsError, match=r"engine belongs in the table \[engine\]"):
        TextSettings.load(["--config", str(file)], {})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vllm-args=--enforce-eager"], "vllm_args is for engine vllm, the engine is triptych"),
        (["--engine", "vllm", "--role", "EPD"], "engine vllm serves roles P, D and PD, not EPD"),
        (["--engine", "vllm", "--delay-profile", "somewhere"], "cannot have a delay_profile"),
        (["--engine", "vllm", "--device", "cuda:1"], "CUDA_VISIBLE_DEVICES"),
        (["--engine", "vllm", "--kv-cache-bytes", "1000000"], "engine vllm does not have kv_cache_bytes"),
        (["--engine", "sglang"], "triptych"),
    ],
)
def test_options_of_one_engine_are_refused_with_another(arguments: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        TextSettings.load(["--model", "m", *arguments], {})


@pytest.mark.parametrize(
    ("role", "kept"), [("P", None), ("EP", None), ("D", 0.05), ("ED", 0.05), ("PD", 0.05), ("EPD", 0.05)]
)
def test_steps_are_kept_short_where_answers_are_decoded(role: str, kept: float | None) -> None:
    settings = TextSettings.load(["--model", "m", "--role", role, "--tpot-slo-s", "0.05", "--token-budget", "512"], {})
    assert (settings.engine_options.tpot_slo_s, settings.engine_options.token_budget) == (kept, 512)


def test_one_that_switches_has_its_own_role_among_those_that_it_can_take() -> None:
    settings = TextSettings.load(["--model", "m", "--switchable", "EPD", "--mount-encoder=--arena-bytes 1048576"], {})
    assert (settings.role, settings.widest) == (Role.PD, Role.EPD)
    assert TextSettings.load(["--model", "m"], {}).widest is Role.PD
    with pytest.raises(SettingsError, match="switchable is ED, must include the role PD"):
        TextSettings.load(["--model", "m", "--switchable", "ED"], {})
    with pytest.raises(SettingsError, match="engine vllm cannot switch"):
        TextSettings.load(["--model", "m", "--switchable", "PD", "--engine", "vllm"], {})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "resident=role is for instances that switch between encode and other stages"),
        (["--switchable", "PD"], "resident=role is for instances that switch between encode and other stages"),
        (["--engine", "vllm"], "engine vllm cannot load and unload weights"),
        (["--switchable", "EPD", "--delay-profile", "somewhere"], "resident=role needs engines that compute"),
        (["--resident", "half"], "'all', 'role' or 'auto'"),
    ],
)
def test_weights_are_unloaded_only_where_another_part_takes_over(arguments: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        TextSettings.load(["--model", "m", "--resident", "role", *arguments], {})


def test_adapters_are_named_and_may_be_repeated() -> None:
    settings = TextSettings.load(["--model", "m", "--lora", "a=/x", "--lora", "b=y=z", "--max-lora-rank", "32"], {})
    assert (settings.lora, settings.lora_limits.max_lora_rank) == (("a=/x", "b=y=z"), 32)
    assert TextSettings.load(["--model", "m"], {"TRIPTYCH_TEXT_LORA": "a=/x,b=/y"}).lora == ("a=/x", "b=/y")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lora", "a"], "not NAME=DIR"),
        (["--lora", "a="], "not NAME=DIR"),
        (["--lora", "a b=x"], "not NAME=DIR"),
        (["--lora", "a=x", "--lora", "a=y"], "two adapters have the same name"),
        (["--lora", "a=x", "--engine", "vllm"], "engine vllm serves no LoRA adapters"),
        (["--lora-root", "x", "--engine", "vllm"], "engine vllm serves no LoRA adapters"),
        (["--lora", "a=x", "--delay-profile", "x"], "an engine that computes"),
        (["--max-loras", "0"], "max_loras"),
        (["--max-loras", "1000"], "max_loras is 1000, must be at most 256"),
    ],
)
def test_adapters_that_cannot_be_served_are_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        TextSettings.load(["--model", "m", *arguments], {})
