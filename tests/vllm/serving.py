"""A ``vllm serve`` that Triptych did not start, with our connector, in processes of its own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from benchmarks.vllm_servers import group_runs
from tests.vllm.reference import MAX_TOKENS, ROOT
from triptych.cli import ports
from triptych.runtime.clock import monotonic

SERVED = "vllm-served"
KV_CACHE_BYTES = 64 << 20
_START_S = 240
_STOP_S = 30


@asynccontextmanager
async def vllm_serve(
    directory: Path, routers: str, log: Path, *, workers: int = 1, **options: Any
) -> AsyncGenerator[httpx.AsyncClient]:
    """A vLLM's REST API, once it is ready. ``options`` are those of the connector; ``workers`` compute each step together."""
    (port,) = ports.free(1, ())
    connector = {
        "ec_connector": "PullingConnector",
        "ec_connector_module_path": "triptych.integrations.vllm.pulling",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"routers": routers, **options},
    }
    arguments = [
        *("serve", str(directory), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED),
        *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
        *("--limit-mm-per-prompt", '{"image": 0, "video": 0}', "--enable-mm-embeds"),
        *("--tensor-parallel-size", str(workers), "--ec-transfer-config", json.dumps(connector)),
        *("--middleware", "triptych.integrations.vllm.unavailable.Unavailable"),
    ]
    with TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as sockets:  # vLLM leaves them
        own = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
        own["VLLM_RPC_BASE_PATH"] = sockets
        with log.open("wb") as out:
            process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
                [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments],
                cwd=ROOT,
                env={**os.environ, **own},  # noqa: TID251 - of the child
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client:
                async with asyncio.timeout(_START_S):
                    while not await is_healthy(client):
                        _is_running(process, log)
                        await asyncio.sleep(0.2)
                yield client
                _is_running(process, log)
        finally:
            await asyncio.to_thread(_stop, process)


async def is_healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _is_running(process: "subprocess.Popen[bytes]", log: Path) -> None:
    assert process.poll() is None, f"vLLM ended: {log.read_text()[-3000:]}"


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    end_s = monotonic() + _STOP_S
    try:
        process.wait(_STOP_S)
        while group_runs(process.pid) and monotonic() < end_s:  # its processes remove their shared memory after it
            time.sleep(0.1)
    finally:
        if group_runs(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def ask(client: httpx.AsyncClient, parts: list[Mapping[str, Any]], **options: Any) -> httpx.Response:
    """Greedy, with the ids of its tokens."""
    body = {
        "model": SERVED,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    return await client.post("/v1/chat/completions", json={**body, **options})


def tokens_of(response: httpx.Response) -> tuple[int, ...]:
    assert response.status_code == httpx.codes.OK, f"{response.status_code}: {response.text}"
    return tuple(response.json()["choices"][0]["token_ids"])
