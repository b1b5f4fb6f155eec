"""``triptych simulate`` through the command line."""

import json
import re
import shlex
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.families.test_architecture import PUBLISHED
from triptych.cli.main import app

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
LLAVA = PUBLISHED["llava-1.5-7b"][1] | {"torch_dtype": "float16"}
SHORT = ("--rate", 3, "--duration", 6, "--output-tokens", 8)


def triptych(*arguments: str | Path | float, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAVA))
    return path


def test_a_configuration_alone_is_simulated_on_a_device(config: Path, tmp_path: Path) -> None:
    results, trace = tmp_path / "results.json", tmp_path / "out" / "trace.json"
    said = triptych(
        *("--model", config, "--device", "a100-80", "--preset", "epd", "--roles", "E:2,P:1,D:2", *SHORT),
        *("--images", "0:0.5,2:0.5", "--slo", "ttft=2s,tbt=50ms", "--slo-ttft-ms", 2000),
        *("--json", results, "--perfetto", trace),
    )
    assert "computed for NVIDIA A100 SXM 80 GB" in said
    assert "attainment 100.0%" in said
    assert "requests/s: $10.80 per hour" in said, "five devices at $2.16"
    document = json.loads(results.read_text())
    [run] = document["runs"]
    assert document["mode"] == "services"
    assert run["report"]["requests"] == run["report"]["answered"] == len(run["requests"]) > 5
    assert {use["role"] for use in run["instances"]} == {"E", "P", "D"}
    assert run["moved_bytes"]["into decode-1"] + run["moved_bytes"]["into decode-2"] > 0, "keys and values"
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"prepare", "encode", "step", "copy", "pull"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")


def test_a_sweep_finds_the_goodput_over_several_seeds(config: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    said = triptych(
        *("--model", config, "--device", "l40s", "--sweep", "1,60", "--duration", 8, "--seeds", 2),
        *("--slo-ttft-ms", 1000, "--report", report),
    )
    assert "goodput 1 requests/s" in said
    page = report.read_text()
    assert page.count("<svg") == 1 + 2 * 4
    assert "simulated by services" in page
    assert "http" not in page.replace("http://www.w3.org/", "").replace("http://purl.org/", "").replace(
        "http://creativecommons.org/", ""
    ), "nothing is fetched"


def test_processes_of_one_host_share_its_cores(config: Path, tmp_path: Path) -> None:
    results, host = tmp_path / "results.json", tmp_path / "host.toml"

    def mean_s(text: str) -> float:
        host.write_text(text)
        triptych(
            "--model", config, "--device", "a100-80", "--roles", "EPD:3", *SHORT, "--host", host, "--json", results
        )
        return statistics.mean(request["e2e_s"] for request in json.loads(results.read_text())["runs"][0]["requests"])

    many, one = mean_s("cores = 32"), mean_s("cores = 1")
    assert one > 1.3 * many
    assert mean_s("cores = 32\n[gateway]\nrequest = [0.02, 0.02]") == pytest.approx(many + 0.02, abs=0.008)
    host.write_text("cores = 2\n[gateway]\nitems = 1\n")
    said = triptych("--model", config, "--rate", 1, "--host", host, status=2)
    assert "there is no gateway.items; there are end, item, item_end, message, request" in said


def test_options_come_from_a_file_and_are_overridden(config: Path, tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(
        f'[cluster]\nmodel = "{config}"\ndevice = "h100"\nroles = "E:1,PD:1"\nmax-sequences = 8\n'
        "[workload]\nrate = 9\nimages = [0, 1]\nduration = 5\noutput_tokens = 4\nfault = ['2:kill:encoder-1', '3:start:encoder-1']\n"
    )
    results = tmp_path / "results.json"
    said = triptych("--scenario", scenario, "--rate", 2, "--json", results)
    document = json.loads(results.read_text())
    assert document["settings"]["rate"] == "2.0"
    assert document["settings"]["options of services"] == "--max-sequences=8"
    assert "kill encoder-1 (fault of the scenario)" in said


def test_the_demo_model_is_simulated_with_measured_profiles(tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    analytic = ("profile", "--analytic", "--model", "demo", "--device", "cpu", "--out", str(profiles))
    assert CliRunner().invoke(app, list(analytic)).exit_code == 0
    said = triptych("--profiles", profiles, "--device", "cpu", *SHORT)
    assert "offered" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", 1, "--device", "h1000"), "h1000"),
        (("--rate", 1, "--device", "E=h100"), "nothing is said of PD"),
        (("--rate", 1, "--device", "X=h100"), "'X=h100' is not ROLE=VALUE"),
        (("--rate", 1, "--tensor-parallel", "3"), "3"),
        (("--rate", 1, "--tensor-parallel", "0"), "a degree is a number from 1 to 64"),
        ((), "a request rate is missing"),
        (("--rate", 1, "--sweep", "1,2"), "exclude each other"),
        (("--rate", 1, "--roles", "E:1"), "nothing would prefill and decode"),
        (("--rate", 1, "--preset", "epd", "--roles", "EPD:1"), "only their counts can change"),
        (("--rate", 1, "--preset", "epd", "--slo", "ttft=1s"), "takes objectives"),
        (("--rate", 1, "--fault", "2:kill"), "write SECONDS:WHAT:INSTANCE"),
        (("--rate", 1, "--fault", "2:burn:encoder-1"), "WHAT is kill, start, hang or go-on"),
        (("--rate", 1, "--fault", "2:kill:encoder-9"), "there will be no encoder-9"),
        (("--rate", 1, "--fault", "nan:kill:encoder-1"), "SECONDS is a number"),
        (("--rate", 1, "--fault", "1:kill:encoder-1:now"), "write SECONDS:WHAT:INSTANCE"),
        (("--rate", 1, "--engine", "vllm"), "simulate does not have --engine"),
        (("--rate", 1, "--duration", 3, "--warm-up", 10), "no request comes after it"),
        (
            ("--rate", 1, "--sounds", "1", "--images", "0"),
            "no request can be served: the model takes images, not audio",
        ),
        (("--rate", 1, "--text-tokens", "100000"), "no request can be served: the prompt has"),
        (("--rate", 1, "--device", "E=l4,PD=h100,E=h100"), "E is there more than once"),
        (("--rate", 1, "--json", "a.json", "--report", "a.json"), "name one file"),
        (("--rate", 1, "--images", "many"), "is not VALUE or VALUE:WEIGHT"),
        (("--rate", 1, "--max-seqences", "8"), "did you mean --max-sequences"),
        (("--rate", 1, "--json", "/proc/nowhere/results.json"), "cannot write"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_anything_runs(
    config: Path, arguments: tuple[str | float, ...], message: str
) -> None:
    assert message in triptych("--model", config, *arguments, status=2)


def test_profiles_of_another_model_or_device_are_refused(config: Path, tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    analytic = ("profile", "--analytic", "--model", str(config), "--device", "h100", "--out", str(profiles))
    assert CliRunner().invoke(app, list(analytic)).exit_code == 0
    given = ("--model", config, "--profiles", profiles, *SHORT)
    assert "computed for NVIDIA H100" in triptych(*given, "--device", "h100")
    assert "none is of this model's encoder" in triptych(*given, "--device", "a100-80", status=2)
    said = triptych("--profiles", profiles, "--device", "h100", *SHORT, status=2)
    assert "none is of this model's encoder" in said, "the demo model's"


def test_requests_of_the_warm_up_are_not_counted(config: Path, tmp_path: Path) -> None:
    runs = []
    for number, arguments in enumerate(((), ("--warm-up", 4))):
        results = tmp_path / f"{number}.json"
        triptych("--model", config, "--rate", 5, "--duration", 8, "--output-tokens", 4, "--json", results, *arguments)
        runs.append(json.loads(results.read_text())["runs"][0])
    whole, rest = (run["report"] for run in runs)
    assert 0 < rest["requests"] < whole["requests"]
    assert rest["requests_per_s"] == pytest.approx(5.0, rel=0.5)
    assert {request["ttft_s"] for request in runs[1]["requests"]} <= {
        request["ttft_s"] for request in runs[0]["requests"]
    }


def test_several_seeds_count_for_the_rate_that_was_asked_for(config: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    triptych(
        *("--model", config, "--sweep", "2,2.2", "--seeds", 3, "--duration", 4, "--output-tokens", 4),
        *("--slo-ttft-ms", 5000, "--json", results),
    )
    document = json.loads(results.read_text())
    assert [run["rate"] for run in document["runs"]] == [2.0] * 3 + [2.2] * 3
    assert document["goodput_rps"] == 2.2


def test_roles_are_switched_between_all_stages(config: Path) -> None:
    said = triptych(
        *("--model", config, "--device", "a100-80", "--roles", "E:1,P:3,D:1", "--switch-roles", "--rate", 8),
        *("--images", 6, "--image-size", "336x336", "--text-tokens", 8, "--output-tokens", 64, "--duration", 60),
        *("--slo", "ttft=1s,tbt=40ms", "--max-sequences", 64),
    )
    assert " switches to " in said


def test_a_model_that_does_not_fit_is_refused_with_numbers(config: Path) -> None:
    said = triptych("--model", config, "--device", "l4", "--dtype", "float32", "--rate", 1, status=2)
    assert "GB" in said
    assert "--tensor-parallel 2 would fit" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate = ", "is not TOML"),
        ("[a]\nrate = 1\n[b]\nrate = 2\n", "rate is there more than once"),
        ("[a.b]\nrate = 1\n", "a table within a table"),
        ("rate = 1\nno_such_option = 3\n", "there is no option --no-such-option"),
    ],
)
def test_a_scenario_that_is_wrong_is_refused(tmp_path: Path, text: str, message: str) -> None:
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(text)
    assert message in triptych("--scenario", scenario, status=2)


def test_the_commands_of_the_page_run(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With shorter runs."""
    page = (ROOT / "docs" / "simulate.md").read_text()
    blocks = re.findall(r"```(sh|toml)\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenario.toml").write_text(next(text for kind, text in blocks if kind == "toml"))
    commands = [shlex.split(text.replace("\\\n", " ")) for kind, text in blocks if kind == "sh"]
    assert len(commands) == 2
    for program, command, *arguments in commands:
        assert (program, command) == ("triptych", "simulate")
        assert "requests simulated by services" in triptych(*arguments, "--duration", 4)
    assert (tmp_path / "simulation.html").is_file()
    assert config.parent == tmp_path
