"""The live view and its parts, against stub processes."""

from collections.abc import Mapping
from io import StringIO
from typing import Any

import httpx
import pytest
from rich.console import Console

from triptych.cli.live import LiveView
from triptych.cli.load import load_figures, load_line
from triptych.cli.metrics import Samples
from triptych.domain.scaling import ProcessPhase

ROUTER = """# HELP triptych_requests_total x
# TYPE triptych_requests_total counter
triptych_requests_total{model="m",outcome="done"} 7.0
triptych_requests_total{model="m",outcome="failed"} 2.0
triptych_requests_running 3.0
process_resident_memory_bytes 1.048576e+08
triptych_event_loop_lag_max_seconds 0.0015
not a sample at all
broken{a="b} c
word x
"""
ENCODER = """triptych_encoder_items_pending 4.0
triptych_arena_leased_bytes 25.0
triptych_arena_capacity_bytes 100.0
"""


class StubCluster:
    """The parts of a cluster that the view reads."""

    url = "http://127.0.0.1:8000"
    router_target = "127.0.0.1:50051"

    def __init__(self) -> None:
        self.scaler = self
        self.phases = {"encoder-1": ProcessPhase.RUNNING, "router": ProcessPhase.RUNNING}
        self.processes: dict[str, int] = {"encoder-1": 11, "router": 12}
        self.targets = {"encoder-1": "127.0.0.1:1", "router": "127.0.0.1:2"}
        self.admin_urls: Mapping[str, str] = {
            "encoder-1": "http://127.0.0.1:29410",
            "router": "http://127.0.0.1:29411",
        }

    def phase(self, process: str) -> ProcessPhase | None:
        return self.phases.get(process)


def answer(request: httpx.Request) -> httpx.Response:
    pages = {"http://127.0.0.1:29411/metrics": ROUTER, "http://127.0.0.1:29410/metrics": ENCODER}
    return httpx.Response(200, text=pages[str(request.url)])


def seen(view: Any, width: int = 150) -> str:
    out = StringIO()
    Console(file=out, width=width).print(view)
    return out.getvalue()


def test_samples_are_summed_over_labels() -> None:
    samples = Samples.parse(ROUTER)
    assert samples.total("triptych_requests_total") == 9
    assert samples.total("triptych_requests_total", outcome="failed") == 2
    assert samples.total("triptych_requests_total", outcome="lost") is None
    assert samples.total("word") is None


def test_a_load_is_printed_on_one_line() -> None:
    assert load_line(Samples.parse(ROUTER)) == "3 requests, 100 MiB, worst loop lag 1.5 ms"
    assert load_line(Samples.parse(ENCODER)) == "4 items pending, arena 25%"
    assert load_line(Samples.parse("")) == ""


def test_attainment_over_all_modalities_is_part_of_the_line() -> None:
    text = (
        'triptych_slo_requests{metric="ttft",modality="text",verdict="met"} 97\n'
        'triptych_slo_requests{metric="ttft",modality="image",verdict="met"} 1\n'
        'triptych_slo_requests{metric="ttft",modality="image",verdict="missed"} 1\n'
        'triptych_slo_requests{metric="ttft",modality="text",verdict="missed"} 1\n'
    )
    assert load_line(Samples.parse(text)) == "TTFT 98.0% within SLO"


def test_a_load_is_also_printed_as_json() -> None:
    assert load_figures(Samples.parse(ENCODER)) == {"items_pending": 4, "arena_usage": 0.25}
    assert load_figures(Samples.parse("")) == {}


async def test_the_view_counts_the_requests_of_all_models() -> None:
    cluster: Any = StubCluster()
    cluster.processes = {"encoder-1": 11, "a-router": 12, "b-router": 13}
    cluster.targets = dict.fromkeys(cluster.processes, "127.0.0.1:1")
    cluster.admin_urls = dict.fromkeys(cluster.processes, "http://127.0.0.1:29411")
    view = LiveView(cluster)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        await view.refresh(http, 1.0)
    assert "6 running, 18 ended (0.0/s), 4 failed, 0 refused" in seen(view)


async def test_the_view_shows_processes_load_requests_and_events() -> None:
    cluster: Any = StubCluster()
    view = LiveView(cluster)
    assert "requests   -" in seen(view)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        await view.refresh(http, 1.0)
        await view.refresh(http, 1.0)
        text = seen(view)
        assert "3 running, 9 ended (0.0/s), 2 failed, 0 refused" in text
        assert "4 items pending, arena 25%" in text
        assert " :29410 " in text
        assert " :29411 " in text
        assert "events" not in text
        del cluster.processes["encoder-1"]
        cluster.phases["encoder-1"] = ProcessPhase.ORDERED
        view.event("encoder-1 was killed by SIGKILL")
        await view.refresh(http, 1.0)
        text = seen(view)
        assert "ordered" in text
        assert "4 items pending" not in text
        assert "encoder-1 was killed by SIGKILL" in text
        cluster.processes["encoder-1"] = 13
        cluster.phases["encoder-1"] = ProcessPhase.RUNNING
        cluster.targets["encoder-2"] = "127.0.0.1:3"
        cluster.admin_urls = {**cluster.admin_urls, "encoder-2": "http://127.0.0.1:29412"}
        cluster.phases["encoder-2"] = ProcessPhase.STARTING
        await view.refresh(http, 1.0)
    text = seen(view)
    assert "ordered" not in text
    assert "starting" in text


async def test_addresses_fit_a_terminal_of_the_usual_width() -> None:
    cluster: Any = StubCluster()
    cluster.processes = {"encoder-1": 4194303, "router": 4194304}
    cluster.targets = {"encoder-1": "127.0.0.1:29400", "router": "127.0.0.1:50051"}
    view = LiveView(cluster)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        await view.refresh(http, 1.0)
    lines = seen(view, 80).splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("router"))
    assert lines[at].split()[:5] == ["router", "4194304", "127.0.0.1:50051", ":29411", "up"]
    assert " ".join("\n".join(lines[at : at + 2]).split()).endswith("3 requests, 100 MiB, worst loop lag 1.5 ms")


@pytest.mark.parametrize("status", [404, 500])
async def test_a_process_without_metrics_is_shown(status: int) -> None:
    cluster: Any = StubCluster()
    view = LiveView(cluster)
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(status))) as http:
        await view.refresh(http, 1.0)
    assert "encoder-1" in seen(view)
