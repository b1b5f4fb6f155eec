"""``triptych plan`` through the command line."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.command_line import invoke
from tests.unit.planning.kit import ROUNDS
from triptych.cli.plan import search
from triptych.cli.plan.factory import ModelFactory
from triptych.cli.simulate.deployment import Hardware
from triptych.domain.stage import Role
from triptych.planning.planner import Question
from triptych.runtime.plans import PlanRecord, read

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
SHORT = ("--candidates", 3, "--output-tokens", 12, "--images", "0:0.5,1:0.5")
SLO = ("--slo", "ttft=2s,tbt=100ms")


def triptych(*arguments: str | Path | float, status: int = 0) -> str:
    result = invoke(["plan", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


@pytest.fixture
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of a search with few and short runs."""
    monkeypatch.setattr(search, "Question", partial(Question, rounds=ROUNDS))


@pytest.mark.usefixtures("short_rounds")
@pytest.mark.timeout(180)
def test_a_plan_for_a_rate_is_shown_and_written(config: Path, tmp_path: Path) -> None:
    results, report = tmp_path / "plan.json", tmp_path / "plan.html"
    said = triptych(
        *("--model", config, "--devices", "a100-80=2", "--rate", 4, *SLO, *SHORT, "--json", results),
        *("--report", report, "--router-log-level", "ERROR"),
    )
    plan = read(results)
    assert plan.chosen is not None
    assert plan.budget.devices == {"a100-80": 2}
    assert plan.winners["cheapest"] in range(len(plan.candidates))
    assert plan.common == {"control-ms": "0.3", "slo": "ttft=2s,tbt=100ms", "router-log-level": "ERROR"}
    assert (plan.workload["rate"], plan.workload["images"]) == ("4", "0:0.5,1:0.5")
    assert f"chosen: {plan.chosen.placement}" in said
    assert "computed for NVIDIA A100 SXM 80 GB" in said
    assert "one more a100-80" in said
    assert "expected error of times: not known" in said
    assert "per million tokens" in said
    assert "Pareto front" in said
    page = report.read_text()
    assert page.count("<svg") == 2
    assert str(plan.chosen.placement) in page
    assert_simulates(plan)


def assert_simulates(plan: PlanRecord) -> None:
    """The options of the chosen placement are those of ``triptych simulate``."""
    assert plan.chosen is not None
    line = shlex.split(plan.simulate_line(plan.chosen.placement))
    result = invoke([*line[1:], "--duration", "4", "--fidelity", "queues"])
    assert result.exit_code == 0, result.output
    assert "requests simulated by queues" in result.output


@pytest.mark.extended
@pytest.mark.usefixtures("short_rounds")
@pytest.mark.timeout(180)
def test_the_same_question_has_the_same_answer(config: Path, tmp_path: Path) -> None:
    plans = []
    for number in range(2):
        results = tmp_path / f"{number}.json"
        triptych("--model", config, "--devices", "a100-80=2", *SLO, *SHORT, "--json", results)
        document = json.loads(results.read_text())
        del document["made"]["at"], document["made"]["took_s"]
        plans.append(document)
    assert plans[0] == plans[1]
    chosen, best = (plans[0]["candidates"][number] for number in (0, plans[0]["winners"]["goodput"]))
    goodputs = [candidate["predicted"]["goodput"]["rps"] for candidate in (chosen, best)]
    assert goodputs[0] > 0.95 * goodputs[1], "less is given up for the simplest placement"


@pytest.mark.extended
@pytest.mark.usefixtures("short_rounds")
@pytest.mark.timeout(180)
def test_objectives_that_nothing_meets_are_explained(config: Path, tmp_path: Path) -> None:
    results = tmp_path / "plan.json"
    said = triptych(
        *("--model", config, "--devices", "a100-80=2", "--rate", 3, "--slo-ttft-ms", 5, *SHORT, "--json", results),
        status=2,
    )
    assert "no placement meets the objectives" in said
    assert "a TTFT of at most 5 ms: image requests take up to" in said
    assert read(results).infeasible is not None
    said = triptych(
        *("--model", config, "--devices", "a100-80=1", "--rate", 300, *SLO, *SHORT, "--json", results), status=2
    )
    assert "with more devices: " in said
    plan = read(results)
    assert plan.infeasible is not None
    assert plan.infeasible.larger is not None
    assert sum(plan.infeasible.larger.device_counts.values()) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "plan needs objectives"),
        (("--slo", "ttft=5x"), "plan needs objectives in seconds"),
        (("--slo", "x"), "--slo x"),
        (SLO, "plan needs a budget or a load"),
        ((*SLO, "--devices", "h100=0"), "'h100=0' is not NAME or NAME=COUNT"),
        ((*SLO, "--devices", "h100=1,h100=2"), "h100 is there more than once"),
        ((*SLO, "--devices", "h99=1"), "there is no device 'h99'"),
        ((*SLO, "--devices", "h100"), "without numbers, plan needs --max-price or --rate"),
        ((*SLO, "--max-price", "-3"), "write dollars per hour"),
        ((*SLO, "--devices", "h100=1", "--sweep", "1,2"), "plan takes one rate"),
        ((*SLO, "--devices", "h100=1", "--no-such-option", "1"), "there is no option --no-such-option"),
        ((*SLO, "--devices", "h100=1", "--images", "x"), "is not VALUE or VALUE:WEIGHT"),
        ((*SLO, "--devices", "h100=1", "--max-sequences", "0"), "max_sequences"),
        ((*SLO, "--devices", "l4=1", "--dtype", "float32"), "cannot hold it"),
        ((*SLO, "--devices", "h100=1", "--text-tokens", "90000"), "no request can be served"),
    ],
)
def test_what_is_wrong_is_refused(config: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in triptych("--model", config, *arguments, status=2)


def test_batch_limits_of_vllm_are_those_of_its_arguments(config: Path) -> None:
    hardware = Hardware("h100", "1", None, None, None, 4, 0.0003)
    settings = {"engine": "vllm", "vllm-args": "--max-num-seqs 96 --kv-cache-memory-bytes 8G"}
    factory = ModelFactory(str(config), hardware, settings)
    offer, encoder = factory.offer(Role.PD, "h100", 1), factory.offer(Role.E, "h100", 1)
    assert offer.limits is not None
    assert (offer.limits.max_sequences, offer.limits.token_budget) == (96, 8192)
    assert offer.kv_tokens == (8 << 30) // (2 * 32 * 4096 * 2)
    assert encoder.limits is None, "they are chosen"
    own = ModelFactory(str(config), hardware, {"max-sequences": "48"}).offer(Role.PD, "h100", 1)
    assert own.limits is not None
    assert own.limits.max_sequences == 48


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    said = triptych("--model", tmp_path / "none", "--devices", "h100=1", *SLO, status=2)
    assert "none" in said


@pytest.mark.extended
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_shows_the_best_so_far(config: Path, tmp_path: Path) -> None:
    results = tmp_path / "plan.json"
    command = [sys.executable, "-m", "triptych.cli", "plan", "--model", str(config), "--devices", "a100-80=8", *SLO]
    with subprocess.Popen(
        [*command, "--json", str(results)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        time.sleep(25)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    if results.exists():
        assert "interrupted: this is the best so far" in said
        assert read(results).made.interrupted


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_the_commands_of_the_page_run(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer candidates."""
    text = (ROOT / "docs" / "plan.md").read_text()
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(block.replace("\\\n", " ")) for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]
    for program, command, *arguments in commands:
        assert (program, command) == ("triptych", "plan")
        if arguments[0] == "apply":
            assert "--replan" in triptych(*arguments)
            continue
        if arguments[0] == "transfers":
            assert "keys and values" in triptych(*arguments)
            continue
        assert "chosen: " in triptych(*arguments, "--candidates", 3)
    assert read(tmp_path / "plan.json").chosen is not None
    assert (tmp_path / "plan.html").is_file()
    assert config.parent == tmp_path
