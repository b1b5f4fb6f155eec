"""What ``triptych up`` is told about sizes, objectives and profiles is checked before anything starts."""

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from triptych.engine.delay import synthetic_profiles
from typer.testing import CliRunner

from triptych.cli.main import app
from triptych.cli.model import Model
from triptych.cli.outcome import CliError
from triptych.cli.plan import ClusterPlan
from triptych.cli.scaling import options_of
from triptych.demo import MODEL_DIR, MODEL_ID
from triptych.domain.stage import Role
from triptych.runtime.profiles import write_profile

DEMO = [Model.named("demo")]
TWO = Model.all_named(["a=demo", "owner/b=demo"])


def sizes(encoders: int = 2, text: int = 1) -> dict[Role, int]:
    return {Role.E: encoders, Role.PD: text}


def test_flags_of_scaling_are_those_of_the_services(profiles: Path) -> None:
    plain = options_of(DEMO, sizes())
    assert plain == {"encoder": (), "text": (), "router": (), "pool_manager": ("--max-instances", "8")}
    more = options_of(DEMO, sizes(2, 12), delay_profile=profiles, pool_sizes="E=1-4, PD=1-12", slo="ttft=2s,tbt=5x")
    told = ("--profiles", str(profiles), "--max-instances", "12", "--pool-sizes", "E=1-4,PD=1-12")
    assert more["pool_manager"] == told
    assert more["router"] == ("--profiles", str(profiles), "--slo", "ttft=2s,tbt=5x")
    assert more["encoder"] == more["text"] == ("--delay-profile", str(profiles))


def test_prefixes_are_kept_by_text_processes_and_looked_for_by_routers() -> None:
    flags = options_of(DEMO, sizes(), kv_prefixes=True)
    assert (flags["text"], flags["router"]) == (("--kv-prefixes",), ("--prefixes", "by-cost"))


def test_an_engine_is_that_of_text_processes(profiles: Path) -> None:
    flags = options_of(DEMO, sizes(), engine="vllm", vllm_args="--max-model-len 512")
    assert flags["text"] == ("--engine", "vllm", "--vllm-args=--max-model-len 512")
    assert flags["encoder"] == ()
    with pytest.raises(
        CliError, match="--engine vllm encodes in role E and generates in roles P, D and PD, not in EPD"
    ):
        options_of(DEMO, {**sizes(), Role.EPD: 1, Role.D: 1}, engine="vllm")
    apart = {Role.E: 1, Role.P: 1, Role.D: 1}
    assert options_of(DEMO, apart, engine="vllm")["text"] == ("--engine", "vllm")
    with pytest.raises(CliError, match="cannot have a --delay-profile"):
        options_of(DEMO, sizes(), engine="vllm", delay_profile=profiles)


def test_encoders_have_an_engine_of_their_own(profiles: Path) -> None:
    flags = options_of(DEMO, sizes(), encoder_engine="vllm", encoder_vllm_args="--quantization fp8")
    assert flags["encoder"] == ("--engine", "vllm", "--vllm-args=--quantization fp8")
    assert flags["text"] == ()
    with pytest.raises(CliError, match=r"--encoder-engine vllm encodes in role E .* not in EPD$"):
        options_of(DEMO, {**sizes(), Role.EPD: 1, Role.D: 1}, encoder_engine="vllm")
    with pytest.raises(CliError, match="--encoder-engine vllm computes: it cannot have a --delay-profile"):
        options_of(DEMO, sizes(), encoder_engine="vllm", delay_profile=profiles)


def test_files_of_embeddings_are_those_of_all_encoders(tmp_path: Path) -> None:
    flags = options_of(DEMO, sizes(), embedding_files=tmp_path, embedding_files_bytes=1000)
    told = ("--embedding-files", str(tmp_path), "--embedding-files-bytes", "1000")
    assert flags["encoder"] == flags["mounted_encoder"] == told
    assert flags["text"] == ()
    plans = ClusterPlan.made(
        DEMO, scaled=False, autoscale=False, threads=1, options=flags, roles="E:1,PD:1,EPD:1"
    ).processes
    lines = {plan.name: plan.command(1.0) for plan in plans}
    assert lines["encoder-1"][-4:] == list(told)
    assert [one for one in lines["hybrid-1"] if "embedding" in one] == [f"--mount-encoder={shlex.join(told)}"]
    assert not [one for one in lines["text-1"] if "embedding" in one]


APART = {Role.E: 2, Role.P: 1, Role.D: 1}


def test_what_switches_is_told_objectives_and_profiles(profiles: Path) -> None:
    made = options_of(DEMO, APART, switch_roles=True, delay_profile=profiles, slo="image:ttft=2s,tbt=5x")
    assert made["router"] == ("--profiles", str(profiles), "--slo", "image:ttft=2s,tbt=5x")
    assert made["text"] == ("--delay-profile", str(profiles))
    measured = options_of(DEMO, APART, switch_roles=True, slo="ttft=5x,tbt=5x", measure=lambda: profiles)
    assert measured["pool_manager"][:2] == ("--profiles", str(profiles))


def test_all_instances_that_switch_can_serve_every_stage(tmp_path: Path) -> None:
    flags = {"text": ("--t",), "encoder": ("--e",), "mounted_encoder": ("--arena-bytes", "8 MiB")}
    plans = ClusterPlan.made(
        DEMO, scaled=True, autoscale=False, threads=1, options=flags, roles="E:1,P:1,D:1,EPD:1", switch_roles=True
    ).processes
    lines = {plan.name: plan.command(1.0) for plan in plans}
    assert list(lines) == ["pool-manager", "encoder-1", "prefill-1", "decode-1", "hybrid-1", "router", "gateway"]
    for name, role in (("encoder-1", "E"), ("prefill-1", "P"), ("decode-1", "D"), ("hybrid-1", "EPD")):
        line = lines[name]
        assert line[line.index("--role") :][:4] == ["--role", role, "--switchable", "EPD"]
        assert [one for one in line if "arena" in one] == ["--mount-encoder=--arena-bytes '8 MiB'"]
        assert (line[0].endswith("triptych.services.text"), line[-1]) == (True, "--t")
    assert "--switch-roles" in lines["pool-manager"]
    assert {plan.name: str(plan.pool) for plan in plans if plan.pool is not None}["encoder-1"] == f"{MODEL_ID}/E"
    plain = ClusterPlan.made(DEMO, scaled=True, autoscale=False, threads=1, options=flags, roles="E:1,P:1,D:1")
    assert not [one for plan in plain.processes for one in plan.command(1.0) if one.startswith("--switch")]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "to switch roles takes objectives for the time to the first token and between tokens: --slo ttft=5x"),
        ({"slo": "ttft=5x,e2e=9s"}, "to switch roles takes objectives"),
        ({"slo": "ttft=5x,tbt=5x"}, "profiles of the model's encoder and decoder: --profiles DIR"),
        ({"engine": "vllm"}, "--engine vllm cannot switch roles; --no-switch-roles does without"),
        ({"encoder_engine": "vllm"}, "--encoder-engine vllm cannot switch roles"),
    ],
)
def test_switching_without_what_it_takes_is_refused(told: dict[str, Any], said: str) -> None:
    with pytest.raises(CliError, match=said) as caught:
        options_of(DEMO, APART, switch_roles=True, **told)
    assert caught.value.caller


def test_weights_in_memory_are_those_of_instances_that_switch(profiles: Path) -> None:
    switching = partial(options_of, DEMO, APART, switch_roles=True, slo="ttft=5x,tbt=5x", profiles=profiles)
    for resident in ("all", "role", "auto"):
        flags = switching(resident=resident)
        assert (flags["text"], flags["encoder"]) == (("--resident", resident), ())
    assert switching()["text"] == (), "the environment of the processes decides"
    assert options_of(DEMO, APART, resident="all", delay_profile=profiles)["text"][-2:] == ("--resident", "all")


@pytest.mark.parametrize("resident", ["role", "auto"])
def test_weights_of_a_role_without_switches_or_weights_are_refused(profiles: Path, resident: str) -> None:
    for engine in ("triptych", "vllm"):
        with pytest.raises(CliError, match=f"--resident {resident} is for instances that switch roles") as caught:
            options_of(DEMO, APART, resident=resident, engine=engine)
        assert caught.value.caller
    asleep: dict[str, Any] = {"switch_roles": True, "slo": "ttft=5x,tbt=5x", "delay_profile": profiles}
    with pytest.raises(CliError, match=f"--resident {resident}: with --delay-profile there are no weights"):
        options_of(DEMO, APART, resident=resident, **asleep)


def test_switching_takes_profiles_of_both_parts(tmp_path: Path) -> None:
    encoder, _ = synthetic_profiles(MODEL_DIR)
    write_profile(tmp_path / encoder.file_name, encoder)
    with pytest.raises(CliError, match="to switch roles takes profiles of the model's decoder: --profiles DIR"):
        options_of(DEMO, APART, switch_roles=True, slo="ttft=5x,tbt=5x", profiles=tmp_path)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"vllm_args": "--enforce-eager"}, "--vllm-args is for --engine vllm"),
        ({"encoder_vllm_args": "--quantization fp8"}, "--encoder-vllm-args is for --encoder-engine vllm"),
        ({"embedding_files": Path("kept")}, "--embedding-files-bytes belong together"),
        ({"embedding_files_bytes": 1}, "--embedding-files-bytes belong together"),
        ({"max_instances": 1}, "--max-instances 1: a pool begins with 2 instances"),
        ({"slo": "soon"}, "--slo 'soon' is not"),
        ({"pool_sizes": "E"}, "--pool-sizes 'E' is not .* such as E=1-8"),
        ({"pool_sizes": "X=1-2"}, "--pool-sizes 'X=1-2' has no such role: it is one of E, P, D, PD, EP, ED, EPD"),
        ({"pool_sizes": "EPD=1-2"}, f"there will be no such pool; there will be: {MODEL_ID}/E, {MODEL_ID}/PD$"),
        ({"pool_sizes": "other/E=1-2"}, "there will be no such pool"),
        ({"pool_sizes": "E=1-2,E=1-3"}, "--pool-sizes names E more than once"),
        ({"pool_sizes": "E=1-1"}, f"--roles E:2: --pool-sizes lets pool {MODEL_ID}/E have 1 to 1 instances"),
        ({"pool_sizes": "PD=2-3"}, f"--roles PD:1: --pool-sizes lets pool {MODEL_ID}/PD have 2 to 3 instances"),
    ],
)
def test_what_cannot_be_is_refused_as_a_mistake_of_usage(told: dict[str, Any], said: str) -> None:
    with pytest.raises(CliError, match=said) as caught:
        options_of(DEMO, sizes(), **told)
    assert caught.value.caller


def test_a_pool_that_grows_by_itself_may_begin_below_its_smallest_size() -> None:
    assert "PD=2-3" in options_of(DEMO, sizes(), pool_sizes="PD=2-3", autoscale=True)["pool_manager"]


def test_sizes_of_one_model_are_held_against_that_model() -> None:
    options_of(TWO, sizes(), pool_sizes="a/E=1-2,owner/b/E=2-4")
    with pytest.raises(CliError, match="--roles E:2: --pool-sizes lets pool a/E have 3 to 4 instances"):
        options_of(TWO, sizes(), pool_sizes="a/E=3-4")


def test_profiles_are_read_before_anything_starts(tmp_path: Path, profiles: Path) -> None:
    with pytest.raises(CliError, match=f"--profiles {tmp_path}: .*there is no profile") as caught:
        options_of(DEMO, sizes(), profiles=tmp_path)
    assert caught.value.caller
    with pytest.raises(CliError, match=f"--delay-profile {tmp_path}: .*0 profiles of a model's encoder, not one"):
        options_of(DEMO, sizes(), delay_profile=tmp_path)
    twice = tmp_path / "twice"
    for one in synthetic_profiles(MODEL_DIR):
        for hardware in ("a", "b"):
            other = replace(one, identity=replace(one.identity, hardware=hardware))
            write_profile(twice / other.file_name, other)
    with pytest.raises(CliError, match="2 profiles of a model's encoder, not one"):
        options_of(DEMO, sizes(), delay_profile=twice, profiles=profiles)
    (twice / "bad.json").write_text("{")
    with pytest.raises(CliError, match=r"--profiles .*bad\.json"):
        options_of(DEMO, sizes(), profiles=twice)


def test_nothing_is_measured_before_the_rest_is_known_to_be_right(tmp_path: Path) -> None:
    measured: list[str] = []

    def measure() -> Path:
        measured.append("now")
        return tmp_path

    with pytest.raises(CliError):
        options_of(DEMO, sizes(), pool_sizes="E=1-1", measure=measure)
    assert measured == []
    assert options_of(DEMO, sizes(), measure=measure)["router"] == ("--profiles", str(tmp_path))
    assert measured == ["now"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--roles", "PD:1"), "--roles PD:1: nothing would encode"),
        (("--roles", "E:1"), "--roles E:1: nothing would prefill and decode"),
        (("--roles", "EP:1,PD"), "--roles EP:1,PD: 'PD' is not ROLE:COUNT with a count of 1 to 64"),
        (("--roles", ""), "--roles : '' is no role"),
        (("--roles", "EPD:" + "9" * 5000), "--roles EPD:9999"),
        (("--roles", "EPD:\uff11"), "--roles EPD:\uff11: 'EPD:\uff11' is not ROLE:COUNT"),
        (("--roles", "EPD:65"), "--roles EPD:65: 'EPD:65' is not ROLE:COUNT"),
        (("--roles", "EPD:1,DP:1"), "--roles EPD:1,DP:1: 'DP' is no role; roles are E, P, D, PD, EP, ED, EPD"),
        (("--roles", "EPD:1,EPD:2"), "--roles EPD:1,EPD:2: EPD is there more than once"),
        (("--preset", "epd", "--roles", "E:2,PD:1"), "--roles E:2,PD:1: preset epd has roles E, P, D; only"),
        (("--model", "demo", "--model", "demo"), "two models would be served as"),
        (("--model", "a=demo", "--model", "b=demo", "--mount-router"), "--mount-router serves one model"),
        (("--admin-port", "65535"), "--admin-port 65535: 6 processes need as many"),
        (("--roles", "E:3,PD:1", "--pool-sizes", "E=1-2"), "--roles E:3: --pool-sizes lets"),
        (("--reprofile",), "--reprofile is for --autoscale or --switch-roles with the demo model"),
        (("--reprofile", "--autoscale", "--model", "a=demo"), "--reprofile is for --autoscale or --switch-roles with"),
        (("--switch-roles",), "--switch-roles moves instances between roles E, P and D, of which it needs two"),
        (("--preset", "hydra-ep-d", "--switch-roles"), "--switch-roles moves instances between roles E, P and D"),
        (("--roles", "E:1,P:1,D:1", "--switch-roles"), "to switch roles takes objectives"),
        (("--roles", "E:1,P:1,D:1", "--resident", "role"), "--resident role is for instances that switch roles"),
        (("--preset", "epd", "--no-switch-roles", "--resident", "auto"), "--resident auto is for instances that"),
        (("--preset", "epd", "--model", "a=demo"), "to switch roles takes profiles of the model's encoder and decoder"),
    ],
)
def test_mistakes_at_up_are_one_line_with_status_2(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["up", *arguments])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"triptych: {said}")
