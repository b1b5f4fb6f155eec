"""Unused telemetry is not imported; requested telemetry that is not installed is one clear line."""

import subprocess
import sys

import pytest

from triptych.runtime.settings import ServiceSettings
from triptych.runtime.telemetry import Telemetry

IMPORTS = """
import sys
import {module}
print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"opentelemetry", "prometheus_client"}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "expected"), [("triptych.rpc.stubs", "[]"), ("triptych.rpc.server", "['prometheus_client']")]
)
def test_clients_import_no_metrics_and_services_no_tracing_by_default(module: str, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(module=module)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected


def test_without_an_endpoint_there_are_no_traces() -> None:
    assert Telemetry.of("router", ServiceSettings()).tracing is None


def test_unavailable_tracing_ends_the_process_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(
        SystemExit, match=r"router: otlp_endpoint is set, but Triptych's extra 'telemetry' is not installed"
    ):
        Telemetry.of("router", ServiceSettings(otlp_endpoint="http://collector:4317"))


@pytest.mark.parametrize("value", ["collector:4317", "ftp://collector"])
def test_an_endpoint_is_a_url(value: str) -> None:
    with pytest.raises(ValueError, match="otlp_endpoint"):
        ServiceSettings(otlp_endpoint=value)
