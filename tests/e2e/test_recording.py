"""A live cluster's requests are recorded, and replayed against it and in the simulator."""

import asyncio
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.client import post, rest
from tests.e2e.delayed import delayed
from triptych.cli.cluster import LocalCluster

SHAPES = ("--images", "0:1,2:1", "--image-size", "112x84", "--text-tokens", "20:1,40:1", "--output-tokens", "6")


async def triptych(*arguments: str | Path) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "triptych.cli", *map(str, arguments))
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)


async def ran(*arguments: str | Path) -> str:
    process = await triptych(*arguments)
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


def first_run(path: Path) -> dict[str, Any]:
    run: dict[str, Any] = json.loads(path.read_text())["runs"][0]
    return run


async def test_a_live_cluster_is_recorded_and_replayed(tmp_path: Path) -> None:
    out = tmp_path / "recorded.jsonl"
    sent, again, simulated = (tmp_path / f"{name}.json" for name in ("sent", "again", "simulated"))
    async with LocalCluster(roles="E:1,PD:1", options=delayed(tmp_path)) as cluster:
        recording = await triptych("workload", "record", out, "--admin", cluster.admin_urls["router"])
        assert recording.stdout is not None
        assert b"recording the requests of" in await recording.stdout.readline()
        url = ("--url", cluster.url)
        await ran("bench", *url, "--rate", "6", "--duration", "3", *SHAPES, "--ignore-eos", "--json", sent)
        async with rest(cluster.url) as client:
            body = {"model": "nope", "messages": [{"role": "user", "content": "a secret"}]}
            assert (await post(client, body)).status_code == 404
            broken = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
            body = {"model": "triptych-demo", "messages": [{"role": "user", "content": broken}]}
            assert (await post(client, body)).status_code == 400
        recording.send_signal(signal.SIGINT)
        said, _ = await recording.communicate()
        assert recording.returncode == 0, said.decode()
        requests = [json.loads(line) for line in out.read_text().splitlines()]
        entries = first_run(sent)["requests"]
        assert f"{len(entries)} requests are in {out} ({len(entries)} done)" in said.decode()
        assert "1 that failed or left before their sizes were known" in said.decode()
        assert Counter(tuple(request.get("images", ())) for request in requests) == Counter(
            ("112x84",) * entry["images"] for entry in entries
        )
        assert {request["output_tokens"] for request in requests} == {6}
        texts = sorted({request["text_tokens"] for request in requests})
        assert max(texts) - min(texts) >= 20
        assert sorted(requests[0]) == sorted(
            {"arrival_s", "text_tokens", "output_tokens", "outcome", *(["images"] if "images" in requests[0] else [])}
        )
        await ran("bench", *url, "--trace", out, "--duration", "60", "--ignore-eos", "--json", again)
        async with httpx.AsyncClient(trust_env=False) as client:
            document = (await client.get(f"{cluster.admin_urls['router']}/requests?after=0")).json()
    replayed = first_run(again)["requests"]
    assert Counter(entry["images"] for entry in replayed) == Counter(entry["images"] for entry in entries)
    assert len(document["requests"]) == 2 * len(entries)
    assert "secret" not in json.dumps(document)
    await ran(
        *("simulate", "--model", "demo", "--device", "cpu", "--roles", "E:1,PD:1", "--trace", out),
        *("--duration", "60", "--json", simulated),
    )
    report = first_run(simulated)["report"]
    assert report["answered"] == len(entries)
    assert report["images"] == sum(entry["images"] for entry in entries)
    assert report["output_tokens"] == 6 * len(entries)
    prompt_tokens = sum(entry["prompt_tokens"] for entry in entries)
    assert report["prompt_tokens"] == pytest.approx(prompt_tokens, abs=4 * len(entries)), "but for borders of images"
