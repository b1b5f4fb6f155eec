"""``triptych profile --analytic`` and ``triptych devices``, through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import invoke
from tests.unit.families.test_architecture import PUBLISHED
from triptych.demo import MODEL_DIR
from triptych.domain.embedding import DType
from triptych.domain.profile import LoadRow, Measured, Origin, Profile
from triptych.domain.stage import ModelPart, Stage
from triptych.engine.checkpoint import open_checkpoint
from triptych.engine.delay import delay_costs, synthetic_profiles
from triptych.policy.costs import Costs
from triptych.runtime.host import cpu_name
from triptych.runtime.profiles import read_profile, the_profile, write_profile

PARAMETERS, LLAVA = PUBLISHED["llava-1.5-7b"]
LLAVA = LLAVA | {"torch_dtype": "float16"}


def triptych(*arguments: str | Path | int, status: int = 0) -> str:
    result = invoke([str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


def test_a_configuration_alone_gives_profiles_of_both_parts(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "profiles"
    said = triptych(
        "profile", "--analytic", "--model", config, "--device", "h100", "--tensor-parallel", 2, "--out", out
    )
    encoder, decoder = (the_profile(out, part) for part in (ModelPart.ENCODER, ModelPart.DECODER))
    weights = encoder.measured.weights_nbytes + decoder.measured.weights_nbytes
    assert weights == 2 * PARAMETERS
    for profile in (encoder, decoder):
        identity = profile.identity
        assert (identity.hardware, identity.dtype, identity.tensor_parallel) == ("NVIDIA H100 80GB HBM3", DType.F16, 2)
        assert profile.measured.origin is Origin.SYNTHETIC
        assert profile.measured.method == "triptych profile --analytic --device h100"
    assert {row.item_tokens for row in encoder.encode} == {576}
    assert decoder.measured.kv_token_nbytes == 2 * 32 * 4096 * 2
    costs = Costs(decoder)
    assert costs.decode_s(1, 1000).value > 13.4e9 / 2 / 3350e9  # no faster than the memory
    assert "there is only config.json: media are taken to be processed as the encoder needs it" in said
    assert "source of costs: analytic. NVIDIA H100 SXM 80 GB: NVIDIA H100 data sheet. Efficiencies: " in said
    assert "keys and values of 24" in said


def test_a_model_directory_has_the_identity_that_its_processes_tell(tmp_path: Path) -> None:
    triptych("profile", "--analytic", "--device", "cpu", "--out", tmp_path)
    checkpoint = open_checkpoint(MODEL_DIR)
    for part in ModelPart:
        identity = delay_costs(tmp_path, part).profile.identity  # as engines that sleep read them
        assert (identity.digest, identity.hardware) == (checkpoint.part_digest(part), cpu_name())
        assert identity.dtype is DType.F32


def test_what_does_not_fit_says_by_how_much_and_what_would(config: Path, tmp_path: Path) -> None:
    part = ("--part", "decoder", "--out", tmp_path / "profiles")
    said = triptych("profile", "--analytic", "--model", config, "--device", "l4", "--dtype", "float32", *part, status=2)
    assert "the decoder: 1 x l4 cannot hold it: weights take 27.0 GB of each device" in said
    assert "of 21.6 GB that engines use of 24 GB; --tensor-parallel 2 would fit" in said
    assert not (tmp_path / "profiles").exists()
    said = triptych(
        "profile", "--analytic", "--model", config, "--device", "l4", "--tensor-parallel", 3, *part, status=2
    )
    assert "a tensor-parallel degree of 3 does not divide the number of attention heads, 32" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "h101"), "there is no device 'h101'; there are a100-40, a100-80, ascend-910b"),
        (("--model", "/nowhere"), "'/nowhere' is neither a local directory nor the name of a repository"),
        (("--quick", "--plot"), "--quick and --plot would have no effect"),
        (("--kv-cache-mib", "64"), "--kv-cache-mib would have no effect"),
        (("--slo-factor", "3"), "--slo-factor would have no effect"),
        (("--calibrate-model", "demo"), "--calibrate-model goes with --calibrate"),
    ],
)
def test_options_that_cannot_be_used_are_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in triptych("profile", "--analytic", *arguments, "--out", tmp_path, status=2)


def test_analytic_options_are_refused_where_profiles_are_measured(tmp_path: Path) -> None:
    said = triptych("profile", "--tensor-parallel", 2, "--out", tmp_path, status=2)
    assert "--tensor-parallel, --catalogue, --calibrate and --calibrate-model go with --analytic" in said


def test_an_unknown_family_and_a_broken_configuration_are_named(config: Path, tmp_path: Path) -> None:
    config.write_text(json.dumps(LLAVA | {"model_type": "mystery"}))
    assert "model_type 'mystery' is not known" in triptych("profile", "--analytic", "--model", config, status=2)
    config.write_text(json.dumps(LLAVA | {"text_config": {"model_type": "llama", "hidden_size": "wide"}}))
    said = triptych("profile", "--analytic", "--model", config, "--out", tmp_path / "out", status=2)
    assert "hidden_size is 'wide', not a positive integer" in said


def measured_by_demo(directory: Path, **changes: Any) -> Profile:
    """A profile of the demo model's decoder as if measured here: a step of 10 ms, 1 ms a sequence, 0.5 ms a prompt token."""
    _, decoder = synthetic_profiles(MODEL_DIR)
    identity = decoder.identity
    profile = Profile(
        identity=type(identity)(
            **{
                "hardware": cpu_name(),
                **{name: getattr(identity, name) for name in ("part", "digest", "stages", "dtype")},
                **changes,
            }
        ),
        measured=Measured(Origin.MEASURED, "2026-11-28T00:00:00Z"),
        prefill=tuple(
            row._replace(new_tokens=new, seconds=0.01 + 0.0005 * new)
            for row in decoder.prefill[:1]
            for new in (16, 32, 64, 128, 256, 512)
        ),
        decode=tuple(
            row._replace(batch=batch, seconds=0.01 + 0.001 * batch)
            for row in decoder.decode[:1]
            for batch in (1, 2, 4, 8, 16)
        ),
        load=(LoadRow(Stage.DECODE, 1, 1, 1, 1.0, 0.1, 0.1, 0.1, 0.1, 0.1),),
    )
    write_profile(directory / "measured.json", profile)
    return profile


def test_a_measured_profile_calibrates_and_errors_are_said(tmp_path: Path) -> None:
    measured_by_demo(tmp_path)
    part = ("--part", "decoder", "--device", "cpu", "--out", tmp_path / "out")
    said = triptych("profile", "--analytic", "--calibrate", tmp_path / "measured.json", *part)
    assert "Efficiencies: calibrated with measured.json of 2026-11-28" in said
    assert "error at these rows: prefill" in said
    assert "error at held-out rows: prefill" in said
    (file,) = (tmp_path / "out").glob("*.json")
    profile = read_profile(file)
    costs = Costs(profile)
    assert costs.decode_s(4, 16).value == pytest.approx(0.014, rel=0.1)
    assert costs.prefill_s(256).value == pytest.approx(0.138, rel=0.1)
    assert {row.table for row in profile.errors} == {"prefill", "decode"}
    assert profile.measured.method.endswith("calibrated with measured.json of 2026-11-28")


def test_a_profile_of_something_else_does_not_calibrate(tmp_path: Path, config: Path) -> None:
    given = ("--calibrate", tmp_path / "measured.json", "--part", "decoder", "--out", tmp_path / "out")
    measured_by_demo(tmp_path)
    said = triptych("profile", "--analytic", "--model", config, "--device", "cpu", *given, status=2)
    assert "measured.json was measured with another decoder than that of" in said
    assert "name its model with --calibrate-model" in said
    triptych(
        "profile",
        "--analytic",
        "--model",
        config,
        "--device",
        "cpu",
        "--dtype",
        "bfloat16",
        "--calibrate-model",
        "demo",
        *given,
    )
    measured_by_demo(tmp_path, hardware="Another CPU")
    said = triptych("profile", "--analytic", "--device", "cpu", *given, status=2)
    assert f"measured.json was measured on 'Another CPU', cpu is {' '.join(cpu_name().split())}" in said


def test_the_catalogue_is_listed_with_the_users_devices(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[device.cheap-h100]\nlike = "h100"\ntitle = "H100 at a price of ours"\nmemory_gb = 81\n')
    said = triptych("devices", "--catalogue", own)
    assert "cheap-h100" in said
    assert "rtx-4090" in said
    devices = json.loads(invoke(["devices", "cheap-h100", "--catalogue", str(own), "--json"]).output)
    assert devices["cheap-h100"]["memory_nbytes"] == 81 * 10**9
    assert devices["cheap-h100"]["flops_per_s"]["BF16"] == 989.4e12
    assert devices["cheap-h100"]["price"] is None
    said = triptych("devices", "h100")
    assert "NVIDIA H100 data sheet" in said
    assert "3.35 $/h (docs.runpod.io/serverless/pricing, active workers, 2026-11-28)" in said
    assert "there is no device 'h1'" in triptych("devices", "h1", status=2)
