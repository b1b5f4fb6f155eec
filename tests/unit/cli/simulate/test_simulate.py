"""``triptych simulate`` through the command line."""

import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from tests.command_line import invoke
from tests.unit.families.test_architecture import PUBLISHED

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
SHORT = ("--rate", 3, "--duration", 6, "--output-tokens", 8)


def triptych(*arguments: str | Path | float, status: int = 0) -> str:
    result = invoke(["simulate", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


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


@pytest.mark.extended
def test_a_sweep_finds_the_goodput_over_several_seeds(config: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    said = triptych(
        *("--model", config, "--device", "l40s", "--sweep", "1,25", "--duration", 8, "--seeds", 2),
        *("--slo-ttft-ms", 1000, "--report", report),
    )
    assert "goodput 1 requests/s" in said
    page = report.read_text()
    assert page.count("<svg") == 1 + 2 * 4
    assert "simulated by services" in page
    assert "http" not in page.replace("http://www.w3.org/", "").replace("http://purl.org/", "").replace(
        "http://creativecommons.org/", ""
    ), "nothing is fetched"


SEARCHED: tuple[str | float, ...] = (
    "--device",
    "l4",
    "--roles",
    "EPD:1",
    "--images",
    2,
    "--output-tokens",
    2,
    "--duration",
    5,
    "--seeds",
    2,
)


def test_the_goodput_is_found_between_two_rates_with_its_interval(config: Path, tmp_path: Path) -> None:
    results, report = tmp_path / "results.json", tmp_path / "report.html"
    said = triptych(
        *("--model", config, *SEARCHED, "--goodput", "0.5..64", "--slo-ttft-ms", 2000, "--attainment", 0.8),
        *("--warm-up", 1, "--json", results, "--report", report),
    )
    document = json.loads(results.read_text())
    found = document["goodput"]
    least, most = sorted(found["by_seed"].values())
    assert 0.5 < least <= most < 64
    assert found["mean_rps"] == document["goodput_rps"] == pytest.approx((least + most) / 2)
    low, high = found["interval_rps"]
    half = 12.7062 * (most - least) / 2
    assert high - found["mean_rps"] == pytest.approx(half, abs=1e-3), "t of two values"
    assert low == pytest.approx(max(0.0, found["mean_rps"] - half), abs=1e-3), "no rate is below 0"
    assert f"goodput {found['mean_rps']:.3g} requests/s" in said
    assert "at least 80% of the requests (those of the first 1 s do not count) get a TTFT of at most 2000 ms" in said, (
        "the definition is beside the figure"
    )
    for seed, rate in found["by_seed"].items():
        runs = {run["rate"]: run["report"]["attainment"] for run in document["runs"] if run["seed"] == int(seed)}
        assert runs[rate] >= 0.8
        assert any(share < 0.8 and rate < tried <= 1.02 * rate for tried, share in runs.items())
    assert report.read_text().count("Over time") == 2, "the runs at the goodput of each seed"


@pytest.mark.extended
def test_runs_of_a_seed_have_the_same_requests_at_every_rate_and_in_every_cluster(config: Path, tmp_path: Path) -> None:
    runs = []
    for number, placement in enumerate(("E:1,PD:1", "EPD:2")):
        results = tmp_path / f"{number}.json"
        triptych(
            *("--model", config, "--roles", placement, "--sweep", "2,6", "--duration", 8, "--text-tokens", "8,50,90"),
            *("--images", "0,1,2", "--output-tokens", "2,5", "--json", results),
        )
        runs += json.loads(results.read_text())["runs"]
    assert len(runs) == 4
    slow = runs[0]["requests"]
    for run in runs[1:]:
        assert len(run["requests"]) >= len(slow) > 8
        for first, request in zip(slow, run["requests"], strict=False):
            assert request["arrival_s"] * run["rate"] == pytest.approx(first["arrival_s"] * 2, abs=1e-4)
            assert [request[part] for part in ("kind", "prompt_tokens", "tokens")] == [
                first[part] for part in ("kind", "prompt_tokens", "tokens")
            ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--goodput", "15..60"), "even at 15 requests/s, the least rate"),
        (("--goodput", "0.2..0.4"), "no limit is found, as at 0.4 requests/s, the highest rate"),
    ],
)
def test_a_bracket_without_the_limit_is_refused_with_what_was_tried(
    config: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    results = tmp_path / "results.json"
    said = triptych(
        *("--model", config, *SEARCHED, "--duration", 3, "--seeds", 1, *arguments),
        *("--slo-ttft-ms", 2000, "--json", results),
        status=2,
    )
    assert message in said
    document = json.loads(results.read_text())
    assert (document["goodput"], document["goodput_rps"]) == (None, None)
    assert message in document["no_goodput"]
    assert document["runs"]


def pair(config: Path, tmp_path: Path, first: str, second: str) -> tuple[Path, Path]:
    paths = tmp_path / "a.toml", tmp_path / "b.toml"
    for path, text in zip(paths, (first, second), strict=True):
        path.write_text(f'model = "{config}"\n{text}\n')
    return paths


def test_two_scenarios_are_compared_over_the_same_requests(config: Path, tmp_path: Path) -> None:
    files = pair(config, tmp_path, 'device = "l40s"\nroles = "EPD:1"', 'device = "h100"\nroles = "EPD:1"\nrate = 9')
    results, report = tmp_path / "results.json", tmp_path / "report.html"
    said = triptych(
        *("--compare", *files, "--rate", 3, "--seeds", 2, "--duration", 6, "--output-tokens", 4, "--slo-ttft-ms", 200),
        *("--json", results, "--report", report),
    )
    document = json.loads(results.read_text())
    assert document["compared"] == ["a.toml", "b.toml"]
    differences = {entry["figure"]: entry for entry in document["differences"]}
    ttft = differences["TTFT mean"]
    means = [[run["report"]["ttft"]["mean_s"] for run in simulation["runs"]] for simulation in document["simulations"]]
    by_seed = [second - first for first, second in zip(*means, strict=True)]
    assert ttft["difference"] == pytest.approx(sum(by_seed) / 2)
    assert ttft["interval"][1] - ttft["difference"] == pytest.approx(
        12.7062 * abs(by_seed[0] - by_seed[1]) / 2, rel=1e-3
    )
    assert ttft["difference"] < 0 < differences["attainment"]["difference"]
    requests = [
        [[request["arrival_s"] for request in run["requests"]] for run in simulation["runs"]]
        for simulation in document["simulations"]
    ]
    assert requests[0] == requests[1]
    assert "b.toml - a.toml" in said
    assert "TTFT mean" in report.read_text()
    assert "l40s | h100" in report.read_text()


def test_a_difference_that_is_shown_as_nothing_has_no_sign(config: Path, tmp_path: Path) -> None:
    files = pair(config, tmp_path, "control-ms = 0.301", "control-ms = 0.3")
    said = triptych("--compare", *files, "--roles", "EPD:1", *SHORT, "--seeds", 2)
    prices = said.partition("price of 1000 requests ")[2].split()
    assert prices[2:6] == ["$0.00", "$0.00", "to", "$0.00"]
    assert not re.search(r"[-+]\$?0(\.0+)?( ms|%)", said)


@pytest.mark.extended
def test_the_goodput_of_two_scenarios_is_compared(config: Path, tmp_path: Path) -> None:
    files = pair(config, tmp_path, 'device = "l40s"', 'device = "h100"')
    results = tmp_path / "results.json"
    arguments = ("--roles", "EPD:1", "--images", 2, "--output-tokens", 2, "--duration", 4, "--seeds", 1)
    said = triptych(*("--compare", *files, *arguments, "--goodput", "0.5..64", "--slo-ttft-ms", 600, "--json", results))
    document = json.loads(results.read_text())
    [difference] = document["differences"]
    found = [simulation["goodput"]["mean_rps"] for simulation in document["simulations"]]
    assert difference["means"] == found
    assert difference["difference"] == pytest.approx(found[1] - found[0])
    assert difference["difference"] > 0
    assert difference["interval"] is None
    assert "one seed has no interval" in said


@pytest.mark.parametrize(
    ("first", "second", "arguments", "message"),
    [
        ("rate = 2", "rate = 3", (), "a.toml and b.toml have different workloads (asked rates)"),
        ("rate = 2", "rate = 2\nimages = 3\nwarm_up = 1", (), "different workloads (mix, warm up)"),
        ("", "", (), "a request rate is missing"),
        ("rate = 2", "rate = 2\nfault = 'x'", (), "this is of "),
        ("rate = 2", "rate = 2\ncompare = ['x', 'y']", (), "compare is an option of the command line alone"),
        ("rate = 2", "rate = 2", ("--perfetto", "trace.json"), "--perfetto shows one run"),
        ("rate = 2\ntext-tokens = 90000", "rate = 2\ntext-tokens = 90000", (), "a.toml: no request can be served"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    config: Path, tmp_path: Path, first: str, second: str, arguments: tuple[str, ...], message: str
) -> None:
    files = pair(config, tmp_path, first, second)
    assert message in triptych("--compare", *files, *arguments, status=2)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_shows_the_requests_that_had_ended(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 6

    def advance(_: Progress, __: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Progress, "advance", advance)
    results, report = tmp_path / "results.json", tmp_path / "report.html"
    said = triptych("--model", config, *SHORT, "--json", results, "--report", report, status=130)
    document = json.loads(results.read_text())
    [run] = document["runs"]
    assert document["interrupted"]
    assert len(run["requests"]) == run["report"]["answered"] == 6
    assert re.search(r"interrupted: 6 of \d\d requests had ended", said)
    assert "TTFT" in said
    assert "interrupted: these are the figures of what had ended" in report.read_text()


@pytest.mark.usefixtures("interruptible")
def test_interrupted_runs_leave_no_process(config: Path) -> None:
    arguments = ("--model", config, "--sweep", "300,400", "--duration", 300, "--output-tokens", 2, "--images", 0)
    command = [sys.executable, "-m", "triptych.cli", "simulate", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        workers: list[str] = []
        while len(workers) < 3:  # two, and what tracks their resources
            assert process.poll() is None
            workers = children.read_text().split()
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: 0 runs had ended" in said
    while any(map(is_there, workers)):
        pass  # the test's own limit ends it


def is_there(pid: str) -> bool:
    """Whether a process runs; one that has ended may still be listed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_cluster_that_does_not_start_in_a_process_is_one_line(config: Path) -> None:
    slow = ("--control-ms", 1000, "--control-timeout-s", 0.5)
    said = triptych("--model", config, *SHORT, "--seeds", 2, *slow, status=2)
    assert "the cluster cannot be simulated: it does not get ready in time" in said


def test_processes_of_one_host_share_its_cores(config: Path, tmp_path: Path) -> None:
    results, host = tmp_path / "results.json", tmp_path / "host.toml"

    def mean_s(text: str) -> float:
        host.write_text(text)
        triptych(
            "--model", config, "--device", "a100-80", "--roles", "EPD:3", *SHORT, "--host", host, "--json", results
        )
        [run] = json.loads(results.read_text())["runs"]
        return float(statistics.mean(request["e2e_s"] for request in run["requests"]))

    many, single = mean_s("cores = 32"), mean_s("cores = 1")
    assert single > 1.3 * many
    assert mean_s("cores = 32\n[gateway]\nrequest = [0.02, 0.02]") == pytest.approx(many + 0.02, abs=0.008)
    host.write_text("cores = 2\n[gateway]\nitems = 1\n")
    said = triptych("--model", config, "--rate", 1, "--host", host, status=2)
    assert "there is no gateway.items; there are end, item, item_end, message, request" in said


def test_transfers_within_a_host_are_faster_and_those_between_hosts_share_its_network(
    config: Path, tmp_path: Path
) -> None:
    results = tmp_path / "results.json"

    def served(*hosts: str | float) -> tuple[float, dict[str, int]]:
        triptych(
            *("--model", config, "--roles", "E:1,PD:1,D:1", *SHORT, "--images", 1, *hosts, "--json", results),
        )
        [run] = json.loads(results.read_text())["runs"]
        return statistics.median(request["ttft_s"] for request in run["requests"]), run["moved_bytes"]

    near_s, near = served("--devices-per-host", 8)
    far_s, far = served("--devices-per-host", 1, "--host-network", 0.2)
    apart_s, apart = served()
    assert near_s < apart_s < far_s
    assert far_s - apart_s == pytest.approx(576 * 4096 * 2 / 0.2e9, rel=0.2), "an embedding over the host's network"
    assert set(near) == {"out of encoder-1 (within its host)", "into text-1 (within its host)"}
    assert apart["into text-1"] == far["out of host-1"] == near["into text-1 (within its host)"]


def test_encoders_on_the_devices_of_others_slow_them_and_have_no_price(config: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    load = ("--rate", 2, "--duration", 12, "--output-tokens", 60, "--images", 4, "--device", "a100-80")

    def served(*sharing: str | float, roles: str = "E:2,PD:1") -> tuple[float, dict[str, int], str]:
        said = triptych("--model", config, "--roles", roles, *load, *sharing, "--json", results)
        [run] = json.loads(results.read_text())["runs"]
        mean_s = statistics.mean(request["e2e_s"] for request in run["requests"])
        return mean_s, {use["name"]: use["devices"] for use in run["instances"]}, said

    apart_s, apart, _ = served()
    free_s, shared, said = served("--encoders-on", "PD", "--shared-speed", 1)
    turns_s, _, _ = served("--encoders-on", "PD")
    assert apart == {"encoder-1": 1, "encoder-2": 1, "text-1": 1}
    assert shared == {"encoder-1": 0, "encoder-2": 0, "text-1": 1}
    assert "$2.16 per hour" in said
    assert free_s == pytest.approx(apart_s, rel=0.03)
    assert turns_s > 1.05 * apart_s


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
    assert invoke(list(analytic)).exit_code == 0
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
        (("--rate", 1, "--engine", "vllm", "--vllm-args", "--pipeline-parallel-size 2"), "is not simulated"),
        (("--rate", 1, "--engine", "vllm", "--vllm-args", "--enforce-eager"), "give measured --profiles"),
        (("--rate", 1, "--engine", "vllm", "--roles", "EPD:1"), "encoders encode for it"),
        (("--rate", 1, "--engine", "vllm", "--max-sequences", 8), "engine vllm does not have max_sequences"),
        (("--rate", 1, "--duration", 3, "--warm-up", 10), "no request comes after it"),
        (
            ("--rate", 1, "--sounds", "1", "--images", "0"),
            "no request can be served: the model takes images, not audio",
        ),
        (("--rate", 1, "--text-tokens", "100000"), "no request can be served: the prompt has"),
        (("--rate", 1, "--device", "E=l4,PD=h100,E=h100"), "E is there more than once"),
        (("--rate", 1, "--host-network", 50), "--host-network needs --devices-per-host"),
        (("--rate", 1, "--devices-per-host", 2, "--tensor-parallel", 4), "E has 4 devices, a host has 2"),
        (("--rate", 1, "--encoders-on", "P"), "there are no encoders (role E) and instances of that role"),
        (("--rate", 1, "--encoders-on", "PD", "--device", "E=l4,PD=h100"), "E and PD have different devices"),
        (("--rate", 1, "--encoders-on", "PD", "--autoscale"), "goes without --autoscale"),
        (("--rate", 1, "--shared-speed", 0.5), "--shared-speed needs --encoders-on"),
        (("--rate", 1, "--json", "a.json", "--report", "a.json"), "name one file"),
        (("--rate", 1, "--images", "many"), "is not VALUE or VALUE:WEIGHT"),
        (("--rate", 1, "--max-seqences", "8"), "did you mean --max-sequences"),
        (("--rate", 1, "--json", "/proc/nowhere/results.json"), "cannot write"),
        (("--goodput", "1..8"), "--goodput needs objectives"),
        (("--goodput", "8..1", "--slo-ttft-ms", 500), "write the least and the highest rate"),
        (("--goodput", "1..8", "--rate", 2, "--slo-ttft-ms", 500), "leave out --rate and --sweep"),
        (("--goodput", "1..1e6", "--slo-ttft-ms", 500), "more than 1,000,000 requests"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_anything_runs(
    config: Path, arguments: tuple[str | float, ...], message: str
) -> None:
    assert message in triptych("--model", config, *arguments, status=2)


def test_a_refused_simulation_leaves_no_file(config: Path, tmp_path: Path) -> None:
    results = tmp_path / "out" / "results.json"
    triptych("--model", config, "--rate", 1, "--text-tokens", 90_000, "--json", results, status=2)
    assert not results.exists()


def test_vllms_arguments_bound_the_steps_of_its_engine(config: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"

    def most_tokens(arguments: str) -> int:
        triptych(
            *("--model", config, "--device", "h100", "--rate", 20, "--duration", 4, "--images", "0"),
            *("--output-tokens", 60, "--engine", "vllm", "--perfetto", trace),
            *("--vllm-args", f"{arguments} --kv-cache-memory-bytes 16G"),
        )
        names = [event["name"].split() for event in json.loads(trace.read_text())["traceEvents"]]
        return max(int(words[1]) for words in names if words[0] == "step")

    assert most_tokens("--max-num-batched-tokens 50") == 50
    assert most_tokens("--max-num-seqs 2") > 50


def test_profiles_of_another_engine_are_refused(config: Path, tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    analytic = ("profile", "--analytic", "--model", str(config), "--device", "h100", "--out", str(profiles))
    assert invoke(list(analytic)).exit_code == 0
    given = ("--model", config, "--profiles", profiles, "--device", "h100", *SHORT)
    said = triptych(*given, "--engine", "vllm", status=2)
    assert "none is of this model's decoder in F16 with engine vllm" in said
    (path,) = profiles.glob("decoder-*.json")
    decoder = json.loads(path.read_text())
    decoder["identity"]["options"]["vllm"] = ""
    path.write_text(json.dumps(decoder))
    assert "attainment" in triptych(*given, "--engine", "vllm", "--slo-ttft-ms", 2000)
    assert "none is of this model's decoder in F16 with engine triptych" in triptych(*given, status=2)


def test_the_profile_with_the_arguments_of_vllm_is_taken_and_others_warn(config: Path, tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    analytic = ("profile", "--analytic", "--model", str(config), "--device", "h100", "--out", str(profiles))
    assert invoke(list(analytic)).exit_code == 0
    (path,) = profiles.glob("decoder-*.json")
    decoder = json.loads(path.read_text())
    path.unlink()
    for day, arguments in enumerate(("--enforce-eager=True --max-num-seqs=8", "", "--quantization=fp8"), 1):
        decoder["identity"]["options"]["vllm"] = arguments
        decoder["measured"]["at"] = f"2026-11-0{day}T00:00:00Z"
        (profiles / f"decoder-{day}.json").write_text(json.dumps(decoder))
    given = ("--model", config, "--profiles", profiles, "--device", "h100", *SHORT, "--engine", "vllm")

    def of_decoder(arguments: str) -> str:
        results = tmp_path / "results.json"
        triptych(*given, f"--vllm-args={arguments}", "--slo-ttft-ms", 2000, "--json", results)
        [note] = [note for note in json.loads(results.read_text())["costs"] if "of the decoder" in note]
        return str(note).partition("NVIDIA H100 SXM 80 GB")[2]

    assert of_decoder("--max-num-seqs 64") == ""
    assert of_decoder("--enforce-eager --max-num-seqs 64") == ", vLLM with --enforce-eager=True --max-num-seqs=8"
    assert of_decoder("--block-size 32") == "; of an engine with other options: --block-size"


def test_profiles_of_another_model_or_device_are_refused(config: Path, tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    analytic = ("profile", "--analytic", "--model", str(config), "--device", "h100", "--out", str(profiles))
    assert invoke(list(analytic)).exit_code == 0
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


def test_a_recording_is_replayed_to_its_end(config: Path, tmp_path: Path) -> None:
    trace, results = tmp_path / "monday.jsonl", tmp_path / "results.json"
    line = '{"arrival_s": %s, "text_tokens": 9, "output_tokens": 2}\n'
    trace.write_text("".join(line % at_s for at_s in (10, 200, 300)))
    arrivals: dict[str, list[float]] = {}
    for name, arguments in {"whole": (), "part": ("--duration", 250)}.items():
        triptych("--model", config, "--trace", trace, "--json", results, *arguments)
        [run] = json.loads(results.read_text())["runs"]
        arrivals[name] = [request["arrival_s"] for request in run["requests"]]
    assert arrivals == {"whole": [10, 200, 300], "part": [10, 200]}


def test_several_seeds_count_for_the_rate_that_was_asked_for(config: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    triptych(
        *("--model", config, "--sweep", "2,2.2", "--seeds", 3, "--duration", 4, "--output-tokens", 4),
        *("--slo-ttft-ms", 5000, "--json", results),
    )
    document = json.loads(results.read_text())
    assert [run["rate"] for run in document["runs"]] == [2.0] * 3 + [2.2] * 3
    assert document["goodput_rps"] == 2.2


@pytest.mark.extended
def test_roles_are_switched_between_all_stages(config: Path) -> None:
    said = triptych(
        *("--model", config, "--device", "a100-80", "--roles", "E:1,P:3,D:1", "--switch-roles", "--rate", 8),
        *("--images", 6, "--image-size", "336x336", "--text-tokens", 8, "--output-tokens", 64, "--duration", 60),
        *("--slo", "ttft=1s,tbt=40ms", "--max-sequences", 64),
    )
    assert re.search(
        r"(prefill|encoder|decode)-\d switches to role [EPD]: \w+ holds .* in 5 s, .* are within its objective", said
    )


@pytest.mark.extended
def test_stages_that_bear_a_mixed_load_keep_their_instances(config: Path) -> None:
    """Texts are short beside images, so that no wait is within their objective of five times their own latency."""
    said = triptych(
        *("--model", config, "--device", "a100-80", "--preset", "epd", "--roles", "E:3,P:2,D:3", "--rate", 6),
        *("--images", "0:0.3,1:0.5,4:0.2", "--image-size", "1024x768", "--duration", 20),
    )
    assert "switches to" not in said


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


@pytest.mark.extended
def test_the_commands_of_the_page_run(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With shorter runs."""
    page = (ROOT / "docs" / "simulate.md").read_text()
    blocks = re.findall(r"```(sh|toml)\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenario.toml").write_text(next(text for kind, text in blocks if kind == "toml"))
    commands = [shlex.split(text.replace("\\\n", " ")) for kind, text in blocks if kind == "sh"]
    assert len(commands) == 3
    for program, command, *arguments in commands:
        assert (program, command) == ("triptych", "simulate")
        assert "requests simulated by services" in triptych(*arguments, "--duration", 4)
    assert (tmp_path / "simulation.html").is_file()
    assert config.parent == tmp_path


@pytest.mark.parametrize(
    ("name", "items"),
    [("qwen2-vl-2b", ("--images", "0:0.5,2:0.5", "--videos", "0:0.7,1:0.3")), ("llava-1.5-7b", ("--images", "1:1"))],
)
def test_both_fidelities_serve_a_model_alike(name: str, items: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED[name][1] | {"torch_dtype": "float16"}))
    runs: dict[str, Any] = {}
    for fidelity in ("services", "machines"):
        results = tmp_path / f"{fidelity}.json"
        said = triptych(
            *("--model", path, "--device", "h100", "--roles", "E:2,EPD:1,P:1,D:1", "--fidelity", fidelity),
            *("--json", results),
            *items,
            *SHORT,
        )
        assert f"requests simulated by {fidelity} in" in said
        document = json.loads(results.read_text())
        assert document["mode"] == fidelity
        [runs[fidelity]] = document["runs"]
    first, second = runs["services"], runs["machines"]
    assert second["requests"] == [
        {key: pytest.approx(value, abs=1e-9) if isinstance(value, float) else value for key, value in request.items()}
        for request in first["requests"]
    ]
    assert second["moved_bytes"] == first["moved_bytes"]
    assert {request["kind"] for request in first["requests"]} > {"image"} or name == "llava-1.5-7b"


def test_what_the_machines_do_not_have_is_refused(config: Path) -> None:
    said = triptych(
        *("--model", config, "--preset", "modserve", "--autoscale", *SHORT, "--fidelity", "machines"), status=2
    )
    assert "--fidelity machines does not have autoscaling: use --fidelity services" in said
    epd = ("--model", config, "--preset", "epd", *SHORT, "--fidelity", "machines")
    said = triptych(*epd, status=2)
    assert "does not have switching (--no-switch-roles turns it off): use --fidelity services" in said
    assert "requests simulated by machines" in triptych(*epd, "--no-switch-roles")


def test_queues_give_every_kind_of_result(config: Path, tmp_path: Path) -> None:
    """One run with its files, a sweep, goodput and a comparison; each says what made it."""
    common = ("--model", config, "--fidelity", "queues", "--output-tokens", 20, "--duration", 10)
    results, page, trace = tmp_path / "one.json", tmp_path / "one.html", tmp_path / "one.trace"
    said = triptych(
        *(
            *common,
            "--preset",
            "epd",
            "--no-switch-roles",
            "--rate",
            3,
            "--images",
            "0:0.5,2:0.5",
            "--slo-ttft-ms",
            2000,
        ),
        *("--json", results, "--report", page, "--perfetto", trace),
    )
    assert "requests simulated by queues in" in said
    document = json.loads(results.read_text())
    assert document["mode"] == "queues"
    [run] = document["runs"]
    assert run["report"]["requests"] == run["report"]["answered"] == len(run["requests"]) > 10
    assert run["waterfall_s"]["image"]["encode"] > run["waterfall_s"]["text"]["encode"] == 0
    assert run["moved_bytes"]["into decode-1"] > 0, "keys and values"
    assert "simulated by queues" in page.read_text()
    assert {event["cat"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"} >= {
        "encode",
        "step",
    }
    assert "requests simulated by queues" in triptych(*common, "--sweep", "1,2", "--slo-ttft-ms", 2000)
    assert "goodput" in triptych(*common, "--goodput", "1..64", "--seeds", 2, "--slo-ttft-ms", 200)
    scenarios = [tmp_path / "a.toml", tmp_path / "b.toml"]
    for path, roles in zip(scenarios, ("E:1,PD:1", "EPD:2"), strict=True):
        path.write_text(f'model = "{config}"\nroles = "{roles}"\nfidelity = "queues"\n')
    compared = tmp_path / "compared.json"
    triptych("--compare", *scenarios, *("--rate", 2, "--duration", 5, "--seeds", 2, "--json", compared))
    assert json.loads(compared.read_text())["mode"] == "queues"


def test_what_queues_do_not_have_is_refused(config: Path) -> None:
    asked = ("--model", config, *SHORT, "--fidelity", "queues")
    said = triptych(*asked, "--preset", "modserve", "--autoscale", status=2)
    assert "--fidelity queues does not have autoscaling: use --fidelity services" in said
    said = triptych(*asked, "--encoder-routing", "predicted", status=2)
    assert "--fidelity queues does not have encoder-routing=predicted: use --fidelity machines" in said
