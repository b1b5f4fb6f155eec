"""Grafana's dashboards and provisioning: by its schema, on metrics that exist, with texts."""

import enum
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.unit.deploy.metric_names import ROOT, exported, names_in
from tests.unit.deploy.test_alerts import RECORDED

GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARDS = sorted(GRAFANA.glob("dashboards/*.json"))
VLLM = {
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:request_success_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
}
register_default_plugins()


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def panels(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels, those of collapsed rows included, and no rows."""
    for panel in content["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def fits(value: object, hint: Any) -> bool:  # noqa: PLR0911 - a case per kind of type
    """Whether a value, read by a model of Grafana's SDK, is of the type that the model declares."""
    kind, of = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return any(fits(value, alternative) for alternative in of)
    if kind is Literal:
        return value in of
    if kind is list:
        return isinstance(value, list) and all(fits(element, of[0]) for element in value)
    if kind is dict:
        return isinstance(value, dict) and all(fits(element, of[1]) for element in value.values())
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return value in [member.value for member in hint]
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, hint if isinstance(hint, type) else object) and not list(faults(value))


def faults(model: object) -> Iterator[str]:
    if hasattr(model, "to_json"):
        for name, hint in get_type_hints(type(model)).items():
            if not fits(getattr(model, name), hint):
                yield f"{name} is {getattr(model, name)!r}"


def check(content: dict[str, Any]) -> None:
    """Raises AssertionError where Grafana's schema does not know a field, or its value."""
    model = Dashboard.from_json(content)
    assert json.loads(JSONEncoder().encode(model)) == content
    assert not list(faults(model))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_follows_grafanas_schema(path: Path) -> None:
    check(read(path))


@pytest.mark.parametrize(
    "wrong",
    [
        {"refreshes": "30s"},
        {"tags": "triptych"},
        {"graphTooltip": 7},
        {"style": "blue"},
        {"panels": [{"type": "timeseries", "options": {"legend": {"displayMode": "wide"}}}]},
        {"panels": [{"type": "stat", "gridPos": {"x": "left", "y": 0, "w": 1, "h": 1}}]},
    ],
    ids=lambda wrong: str(*wrong),
)
def test_what_the_schema_does_not_allow_is_found(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check(read(DASHBOARDS[0]) | wrong)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_has_texts_and_asks_for_metrics_that_exist(path: Path) -> None:
    content = read(path)
    variables = {f"${{{variable['name']}}}" for variable in content["templating"]["list"]}
    assert len({panel["id"] for panel in panels(content)}) == len(list(panels(content)))
    for panel in panels(content):
        assert panel["title"]
        assert panel["description"]
        for target in panel.get("targets", ()):
            assert target["datasource" if "datasource" in target else "refId"]
            if panel["datasource"]["type"] == "prometheus":
                assert {panel["datasource"]["uid"], target["datasource"]["uid"]} <= variables
                unknown = names_in(target["expr"]) - exported() - RECORDED - {"up", "ALERTS"}
                assert not unknown, f"{panel['title']}: {unknown}"


def test_dashboards_have_names_of_their_own_and_use_vllms_metrics() -> None:
    contents = [read(path) for path in DASHBOARDS]
    assert (
        len({content["uid"] for content in contents})
        == len({content["title"] for content in contents})
        == len(contents)
        == 4
    )
    used = [
        names_in(target.get("expr", ""))
        for content in contents
        for panel in panels(content)
        for target in panel.get("targets", ())
    ]
    assert set().union(*used) >= VLLM


def test_metrics_of_whole_requests_are_those_of_routers() -> None:
    """A text instance with vLLM as its engine has metrics of the same names."""
    of_text = {
        name
        for source in ("gauges.py", "record.py")
        for name in re.findall(r'"(vllm:\w+)"', (ROOT / "services" / "text" / source).read_text())
    }
    queries = [
        target.get("expr", "")
        for path in DASHBOARDS
        for panel in panels(read(path))
        for target in panel.get("targets", ())
    ]
    asked = [found for query in queries for found in re.findall(r"(vllm:\w+)\{([^}]*)\}", query)]
    assert len(of_text) == 7
    of_requests = [(name, labels) for name, labels in asked if not name.startswith(tuple(of_text))]
    assert len(of_requests) >= 10
    assert not [name for name, labels in of_requests if 'job="router"' not in labels]


def test_the_provisioned_data_source_and_folder_are_what_dashboards_and_compose_expect() -> None:
    sources = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())
    scrape = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (source,) = sources["datasources"]
    assert sources["apiVersion"] == 1
    assert set(source) <= {"name", "uid", "type", "access", "url", "isDefault", "editable", "jsonData"}
    assert (source["type"], source["access"], source["isDefault"]) == ("prometheus", "proxy", True)
    assert source["jsonData"]["timeInterval"] == scrape["global"]["scrape_interval"]
    providers = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "triptych.yml").read_text())
    (provider,) = providers["providers"]
    assert providers["apiVersion"] == 1
    assert set(provider) <= {"name", "folder", "type", "disableDeletion", "allowUiUpdates", "options"}
    assert (provider["type"], set(provider["options"])) == ("file", {"path"})
