"""What ``triptych up`` is told about sizes, objectives and profiles is checked before anything starts."""

import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from tests.command_line import invoke
from triptych.cli.cluster_settings import ClusterSettings
from triptych.cli.model import Model
from triptych.cli.outcome import CliError
from triptych.cli.process_plan import ClusterPlan
from triptych.cli.service_options import SERVICES, Flags, ServiceOption, parse, service_options, usual_rows
from triptych.demo import MODEL_DIR, MODEL_ID
from triptych.domain.stage import Role
from triptych.engine.delay import synthetic_profiles
from triptych.runtime.profiles import write_profile

DEMO = [Model.named("demo")]
NOWHERE = ServiceOption("", (), FieldInfo())
TWO = Model.all_named(["a=demo", "owner/b=demo"])


def sizes(encoders: int = 2, text: int = 1) -> dict[Role, int]:
    return {Role.E: encoders, Role.PD: text}


def flags_of(
    models: Sequence[Model] = DEMO,
    roles: Mapping[Role, int] = MappingProxyType({Role.E: 2, Role.PD: 1}),
    *options: str,
    measure: Callable[[], Path] | None = None,
    **told: Any,
) -> Flags:
    """What ``triptych up`` tells each service, given these options."""
    return ClusterSettings(models, roles, parse(options), **told).flags(measure)


def test_each_service_gets_the_options_that_it_has(profiles: Path) -> None:
    assert flags_of() == {
        **dict.fromkeys(("gateway", "encoder", "mounted_encoder", "text", "router"), ()),
        "pool_manager": ("--max-instances=8",),
    }
    options = ("--delay-profile", str(profiles), "--pool-sizes=E=1-4, PD=1-12", "--slo", "ttft=2s,tbt=5x")
    more = flags_of(DEMO, sizes(2, 12), *options)
    known = f"--profiles={profiles}"
    assert more["pool_manager"] == (known, "--max-instances=12", "--pool-sizes=E=1-4, PD=1-12")
    assert more["router"] == (known, "--slo=ttft=2s,tbt=5x")
    assert more["encoder"] == more["text"] == (f"--delay-profile={profiles}",)


def test_an_option_may_name_the_service() -> None:
    named = parse(["--log-level=DEBUG", "--text-log-level", "ERROR", "--encoder-max-item-bytes=9", "--no-kv-prefixes"])
    assert named["router"] == named["pool_manager"] == ("--log-level=DEBUG",)
    assert named["text"] == ("--log-level=DEBUG", "--log-level=ERROR", "--no-kv-prefixes")
    assert named["encoder"] == ("--log-level=DEBUG", "--max-item-bytes=9")
    assert named["gateway"] == ("--log-level=DEBUG",)
    assert parse(["--encoder-routing", "random"])["router"] == ("--encoder-routing=random",), "a setting of this name"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sloo", "ttft=1s"], "there is no option --sloo; did you mean --slo?"),
        (["--portt", "1"], "there is no option --portt; did you mean --port?"),
        (["--role", "E"], "there is no option --role"),
        (["--text-instance-id", "x"], "there is no option --text-instance-id"),
        (["--no-slo"], "there is no option --no-slo"),
        (["E:1"], "'E:1' is no option"),
        (["--slo"], "--slo needs a value"),
        (["-x"], "there is no option -x"),
    ],
)
def test_what_is_no_option_is_refused(options: list[str], said: str) -> None:
    with pytest.raises(CliError, match=re.escape(said)) as caught:
        parse(options, ["--port", "--roles"])
    assert caught.value.caller


def test_every_setting_is_an_option_or_follows_from_the_placement() -> None:
    missing = set[str]()
    for service, cls in SERVICES.items():
        missing |= {name for name in cls.declared() if service not in service_options().get(name, NOWHERE).services}
    owned = "host port admin_port model model_id instance_id role switchable mount_encoder pool_manager scaler"
    assert missing >= set(owned.split())
    assert not missing & {"slo", "log_level", "device", "dtype", "kv_prefixes", "max_instances", "keys"}
    assert all(len(" ".join(row)) > 20 for row in usual_rows())


def test_prefixes_are_kept_by_text_processes_and_looked_for_by_routers() -> None:
    flags = flags_of(DEMO, sizes(), "--kv-prefixes")
    assert (flags["text"], flags["router"]) == (("--kv-prefixes",), ("--prefixes=by-cost",))


def test_an_engine_is_that_of_text_processes(profiles: Path) -> None:
    flags = flags_of(DEMO, sizes(), "--engine", "vllm", "--vllm-args", "--max-model-len 512")
    assert flags["text"] == ("--engine=vllm", "--vllm-args=--max-model-len 512")
    assert flags["encoder"] == ()
    with pytest.raises(CliError, match="text: engine vllm serves roles P, D and PD, not EPD"):
        flags_of(DEMO, {**sizes(), Role.EPD: 1, Role.D: 1}, "--engine=vllm")
    apart = {Role.E: 1, Role.P: 1, Role.D: 1}
    assert flags_of(DEMO, apart, "--engine=vllm")["text"] == ("--engine=vllm",)
    with pytest.raises(CliError, match="text: engine vllm computes, it cannot have a delay_profile"):
        flags_of(DEMO, sizes(), "--engine=vllm", f"--delay-profile={profiles}")


def test_encoders_have_an_engine_of_their_own(profiles: Path) -> None:
    flags = flags_of(DEMO, sizes(), "--encoder-engine=vllm", "--encoder-vllm-args", "--quantization fp8")
    assert flags["encoder"] == ("--engine=vllm", "--vllm-args=--quantization fp8")
    assert flags["text"] == ()
    with pytest.raises(
        CliError, match="encoders of role EPD: engine vllm is for encoders that are processes of their own"
    ):
        flags_of(DEMO, {**sizes(), Role.EPD: 1, Role.D: 1}, "--encoder-engine=vllm")
    with pytest.raises(CliError, match="encoder: engine vllm computes, it cannot have a delay_profile"):
        flags_of(DEMO, sizes(), "--encoder-engine=vllm", f"--delay-profile={profiles}")


def test_settings_of_encoders_are_those_of_mounted_ones_too(tmp_path: Path) -> None:
    kept = (f"--embedding-files={tmp_path}", "--embedding-files-bytes=1000")
    flags = flags_of(DEMO, sizes(), *kept, "--sweep-interval-s=0.2", "--encoder-log-level=INFO")
    assert flags["encoder"] == (*kept, "--sweep-interval-s=0.2", "--log-level=INFO")
    assert flags["mounted_encoder"] == kept, "the others are those of the whole instance"
    assert flags["text"] == ("--sweep-interval-s=0.2",)
    plans = ClusterPlan.make(
        DEMO, scaled=False, autoscale=False, threads=1, options=flags, roles="E:1,PD:1,EPD:1"
    ).processes
    lines = {plan.name: plan.command(1.0) for plan in plans}
    assert [word for word in lines["encoder-1"] if "embedding" in word] == list(kept)
    assert [word for word in lines["hybrid-1"] if "embedding" in word] == [f"--mount-encoder={shlex.join(kept)}"]
    assert not [word for word in lines["text-1"] if "embedding" in word]


def test_settings_of_the_environment_are_validated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_TEXT_KV_ARENA_BYTES", "5")
    with pytest.raises(CliError, match="text: kv_arena_bytes: an arena has more than 4096 bytes, or 0 for none"):
        flags_of()


APART = {Role.E: 2, Role.P: 1, Role.D: 1}


def test_what_switches_is_told_objectives_and_profiles(profiles: Path) -> None:
    slo = "--slo=image:ttft=2s,tbt=5x"
    made = flags_of(DEMO, APART, slo, f"--delay-profile={profiles}", switch_roles=True)
    assert made["router"] == (f"--profiles={profiles}", slo)
    assert made["text"] == (f"--delay-profile={profiles}",)
    measured = flags_of(DEMO, APART, switch_roles=True, measure=lambda: profiles)
    assert measured["pool_manager"][0] == f"--profiles={profiles}"


def test_all_instances_that_switch_can_serve_every_stage(tmp_path: Path) -> None:
    flags = {"text": ("--t",), "encoder": ("--e",), "mounted_encoder": ("--arena-bytes", "8 MiB")}
    plans = ClusterPlan.make(
        DEMO, scaled=True, autoscale=False, threads=1, options=flags, roles="E:1,P:1,D:1,EPD:1", switch_roles=True
    ).processes
    lines = {plan.name: plan.command(1.0) for plan in plans}
    assert list(lines) == ["pool-manager", "encoder-1", "prefill-1", "decode-1", "hybrid-1", "router", "gateway"]
    for name, role in (("encoder-1", "E"), ("prefill-1", "P"), ("decode-1", "D"), ("hybrid-1", "EPD")):
        line = lines[name]
        assert line[line.index("--role") :][:4] == ["--role", role, "--switchable", "EPD"]
        assert [argument for argument in line if "arena" in argument] == ["--mount-encoder=--arena-bytes '8 MiB'"]
        assert (line[0].endswith("triptych.services.text"), line[-1]) == (True, "--t")
    assert "--switch-roles" in lines["pool-manager"]
    assert {plan.name: str(plan.pool) for plan in plans if plan.pool is not None}["encoder-1"] == f"{MODEL_ID}/E"
    plain = ClusterPlan.make(DEMO, scaled=True, autoscale=False, threads=1, options=flags, roles="E:1,P:1,D:1")
    assert not [
        argument for plan in plain.processes for argument in plan.command(1.0) if argument.startswith("--switch")
    ]


def test_instances_that_a_plan_moves_can_serve_every_stage_and_do_not_follow_the_load() -> None:
    flags = parse(["--plan=plan.json", "--replan"])
    assert flags["pool_manager"] == ("--plan=plan.json", "--replan")
    plans = ClusterPlan.make(
        DEMO, scaled=True, autoscale=True, threads=1, options=flags, roles="EPD:2", switchable=True
    ).processes
    lines = {plan.name: plan.command(1.0) for plan in plans}
    assert "--switchable" in lines["hybrid-1"]
    assert "--switch-roles" not in lines["pool-manager"]
    assert lines["pool-manager"][-2:] == ["--plan=plan.json", "--replan"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "to switch roles takes profiles of the model's encoder and decoder: --profiles DIR"),
        (
            ["--slo=ttft=5x,e2e=9s"],
            "to switch roles takes objectives for the time to the first token and between tokens",
        ),
        (["--engine=vllm"], "text: engine vllm cannot switch: leave out switchable"),
        (
            ["--encoder-engine=vllm"],
            "encoders of role EPD: engine vllm is for encoders that are processes of their own",
        ),
    ],
)
def test_switching_without_what_it_takes_is_refused(options: list[str], said: str) -> None:
    with pytest.raises(CliError, match=said) as caught:
        flags_of(DEMO, APART, *options, switch_roles=True)
    assert caught.value.caller


def test_profiles_named_for_one_service_serve_the_other_too(profiles: Path, tmp_path: Path) -> None:
    others = tmp_path / "others"
    shutil.copytree(profiles, others)
    known = f"--profiles={profiles}"
    made = flags_of(DEMO, APART, f"--pool-manager-profiles={profiles}", switch_roles=True, measure=pytest.fail)
    assert (made["router"], made["pool_manager"][0]) == ((known,), known)
    made = flags_of(DEMO, APART, f"--router-profiles={others}", f"--pool-manager-profiles={profiles}")
    assert (made["router"][0], made["pool_manager"][0]) == (f"--profiles={others}", known)


def test_weights_in_memory_are_those_of_instances_that_switch(profiles: Path) -> None:
    for resident in ("all", "role", "auto"):
        flags = flags_of(DEMO, APART, f"--resident={resident}", f"--profiles={profiles}", switch_roles=True)
        assert (flags["text"], flags["encoder"]) == ((f"--resident={resident}",), ())
    assert flags_of(DEMO, APART, f"--profiles={profiles}", switch_roles=True)["text"] == (), "the environment decides"
    asleep = flags_of(DEMO, APART, "--resident=all", f"--delay-profile={profiles}")
    assert asleep["text"] == ("--resident=all", f"--delay-profile={profiles}")


def test_weights_of_a_role_without_switches_or_weights_are_refused(profiles: Path) -> None:
    with pytest.raises(
        CliError, match="text: resident=role is for instances that switch between encode and other"
    ) as caught:
        flags_of(DEMO, APART, "--resident=role")
    assert caught.value.caller
    with pytest.raises(CliError, match="text: engine vllm cannot load and unload weights: leave out resident"):
        flags_of(DEMO, APART, "--resident=role", "--engine=vllm")
    with pytest.raises(CliError, match="text: resident=role needs engines that compute, without delay_profile"):
        flags_of(DEMO, APART, "--resident=role", f"--delay-profile={profiles}", switch_roles=True)


def test_switching_takes_profiles_of_both_parts(tmp_path: Path) -> None:
    encoder, _ = synthetic_profiles(MODEL_DIR)
    write_profile(tmp_path / encoder.file_name, encoder)
    with pytest.raises(CliError, match="to switch roles takes profiles of the model's decoder: --profiles DIR"):
        flags_of(DEMO, APART, f"--profiles={tmp_path}", switch_roles=True)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--vllm-args=--enforce-eager", "text: vllm_args is for engine vllm, the engine is triptych"),
        ("--encoder-vllm-args=--quantization fp8", "encoder: vllm_args is for engine vllm"),
        ("--engine=vlm", "text: engine.engine: Input should be 'triptych' or 'vllm'"),
        ("--embedding-files=kept", "encoder: embedding_files and embedding_files_bytes belong together"),
        ("--embedding-files-bytes=1", "encoder: embedding_files and embedding_files_bytes belong together"),
        ("--embedding-files-bytes=many", "encoder: embedding_files_bytes: Input should be a valid integer"),
        ("--max-instances=1", "--max-instances 1: a pool begins with 2 instances"),
        ("--slo=soon", "router: slo: slo 'soon' is not"),
        ("--pool-sizes=E", "pool manager: control: pool_sizes: 'E' is not .* such as E=1-8"),
        ("--pool-sizes=X=1-2", "'X=1-2': 'X' is no role; roles are E, P, D, PD, EP, ED, EPD"),
        ("--pool-sizes=EPD=1-2", f"there will be no such pool; there will be: {MODEL_ID}/E, {MODEL_ID}/PD$"),
        ("--pool-sizes=other/E=1-2", "there will be no such pool"),
        ("--pool-sizes=E=1-2,E=1-3", "--pool-sizes names E more than once"),
        ("--pool-sizes=E=1-1", f"--roles E:2: --pool-sizes lets pool {MODEL_ID}/E have 1 to 1 instances"),
        ("--pool-sizes=PD=2-3", f"--roles PD:1: --pool-sizes lets pool {MODEL_ID}/PD have 2 to 3 instances"),
    ],
)
def test_what_cannot_be_is_refused_as_a_mistake_of_usage(option: str, said: str) -> None:
    with pytest.raises(CliError, match=said) as caught:
        flags_of(DEMO, sizes(), option)
    assert caught.value.caller


def test_a_pool_that_grows_by_itself_may_begin_below_its_smallest_size() -> None:
    assert "--pool-sizes=PD=2-3" in flags_of(DEMO, sizes(), "--pool-sizes=PD=2-3", autoscale=True)["pool_manager"]


def test_sizes_of_one_model_are_held_against_that_model() -> None:
    flags_of(TWO, sizes(), "--pool-sizes=a/E=1-2,owner/b/E=2-4")
    with pytest.raises(CliError, match="--roles E:2: --pool-sizes lets pool a/E have 3 to 4 instances"):
        flags_of(TWO, sizes(), "--pool-sizes=a/E=3-4")


def test_profiles_are_read_before_anything_starts(tmp_path: Path, profiles: Path) -> None:
    with pytest.raises(CliError, match=f"--profiles {tmp_path}: .*there is no profile") as caught:
        flags_of(DEMO, sizes(), f"--profiles={tmp_path}")
    assert caught.value.caller
    with pytest.raises(CliError, match=f"--delay-profile {tmp_path}: .*0 profiles of a model's encoder, not one"):
        flags_of(DEMO, sizes(), f"--delay-profile={tmp_path}")
    twice = tmp_path / "twice"
    for profile in synthetic_profiles(MODEL_DIR):
        for hardware in ("a", "b"):
            other = replace(profile, identity=replace(profile.identity, hardware=hardware))
            write_profile(twice / other.file_name, other)
    with pytest.raises(CliError, match="2 profiles of a model's encoder, not one"):
        flags_of(DEMO, sizes(), f"--delay-profile={twice}", f"--profiles={profiles}")
    (twice / "bad.json").write_text("{")
    with pytest.raises(CliError, match=r"--profiles .*bad\.json"):
        flags_of(DEMO, sizes(), f"--profiles={twice}")


def test_nothing_is_measured_before_the_rest_is_known_to_be_right(tmp_path: Path) -> None:
    measured: list[str] = []

    def measure() -> Path:
        measured.append("now")
        return tmp_path

    with pytest.raises(CliError):
        flags_of(DEMO, sizes(), "--pool-sizes=E=1-1", measure=measure)
    assert measured == []
    assert flags_of(DEMO, sizes(), measure=measure)["router"] == (f"--profiles={tmp_path}",)
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
        (("--roles", "E:1,P:1,D:1", "--switch-roles", "--slo", "ttft=1s"), "to switch roles takes objectives"),
        (("--preset", "epd", "--no-switch-roles", "--resident", "role"), "text: resident=role is for instances that"),
        (("--rolls", "E:1"), "there is no option --rolls; did you mean --roles?"),
        (("--preset", "epd", "--model", "a=demo"), "to switch roles takes profiles of the model's encoder and decoder"),
    ],
)
def test_mistakes_at_up_are_one_line_with_status_2(arguments: tuple[str, ...], said: str) -> None:
    result = invoke(["up", *arguments])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"triptych: {said}")
