"""The alert rules: valid, each firing and quiet, on metrics that exist, with a runbook entry each."""

import re
import shutil
import subprocess
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import yaml

from tests.unit.deploy.metric_names import ROOT, exported, families, names_in
from triptych.runtime.settings import ServiceSettings
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.gateway.settings import GatewaySettings
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.services.router.settings import RouterSettings
from triptych.services.text.settings import TextSettings

PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
TESTS: list[dict[str, Any]] = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
RUNBOOK = (ROOT / "docs" / "operations.md").read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
ENTRIES = {text.split("\n", 1)[0]: text for text in RUNBOOK.split("\n### ")[1:]}
SERVICES: tuple[type[ServiceSettings], ...] = (
    EncoderSettings,
    GatewaySettings,
    PoolManagerSettings,
    RouterSettings,
    TextSettings,
)


def flags(service: type[ServiceSettings]) -> set[str]:
    groups = ((name, info.annotation) for name, info in service.model_fields.items())
    names = {
        flag for name, kind in groups for flag in ([f.name for f in fields(kind)] if is_dataclass(kind) else [name])
    }
    return {f"--{name.replace('_', '-')}" for name in names}


def promtool(*arguments: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is missing: install Debian's package `prometheus`")
    done = subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)  # 17 s of CPU, of which a busy machine has little
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("check", "config", "prometheus.yml"), id="configuration"),
        pytest.param(("check", "rules", "alerts.yml"), id="rules"),
        pytest.param(("test", "rules", "alerts_test.yml"), id="tests of rules", marks=pytest.mark.extended),
    ],
)
def test_promtool_accepts(arguments: tuple[str, ...]) -> None:
    promtool(*arguments)


def expectations() -> list[tuple[str, list[str]]]:
    """(expression, labels of the series that it must yield) of each test."""
    return [
        (case["expr"], [sample.get("labels", "") for sample in case["exp_samples"]])
        for test in TESTS
        for case in test["promql_expr_test"]
    ]


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_is_tested_firing_and_quiet(name: str) -> None:
    firing = [labels for _, found in expectations() for labels in found if f'alertname="{name}"' in labels]
    asked = re.compile(rf"\b{name}\b")
    quiet = [found for expression, found in expectations() if asked.search(expression) and not found]
    assert firing
    assert quiet
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(ALERTS[name]["annotations"].values())))
    for labels in firing:
        assert used <= set(re.findall(r"(\w+)=", labels)), "its texts name a label that it does not have"


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_has_texts_and_a_runbook_entry(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in {"page", "ticket"}
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert alert["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"
    for part in ("Means", "Users see", "Look", "Do"):
        assert f"\n- **{part}**: " in ENTRIES[name], f"the entry of {name} lacks {part}"


def test_each_runbook_entry_has_its_alert() -> None:
    assert list(ENTRIES) == list(ALERTS)


def test_rules_use_metrics_that_processes_export() -> None:
    for rule in RULES:
        unknown = names_in(rule["expr"]) - exported() - RECORDED - {"up"}
        assert not unknown, f"{rule.get('alert') or rule['record']}: {unknown}"


def test_rules_name_the_jobs_of_compose_and_kubernetes() -> None:
    scraped = {job["job_name"] for job in yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]}
    monitor = ROOT / "deploy" / "kubernetes" / "components" / "monitoring" / "pod-monitor.yaml"
    pods = yaml.safe_load(monitor.read_text())["spec"]
    (selected,) = pods["selector"]["matchExpressions"]
    assert pods["jobLabel"] == selected["key"]
    assert scraped == set(selected["values"])
    for rule in RULES:
        for jobs in re.findall(r'job=~?"([^"]+)"', rule["expr"]):
            assert set(jobs.split("|")) <= scraped


def test_the_runbook_names_metrics_and_settings_that_exist() -> None:
    known = set(families()) | exported()
    settings = set().union(*map(flags, SERVICES))
    for name, entry in ENTRIES.items():
        assert set(re.findall(r"\b(?:triptych_|vllm:)\w+", entry)) <= known, name
        assert set(re.findall(r"`(--[a-z-]+)", entry)) <= settings, name


def test_every_metric_is_documented() -> None:
    documented = set(re.findall(r"`((?:triptych_|vllm:)\w+)", (ROOT / "docs" / "observability.md").read_text()))
    assert not set(families()) - documented
    assert not documented - set(families())
