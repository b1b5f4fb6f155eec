"""Starts `vllm serve` and the proxy between its encoder and its text server, as processes of this machine."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from triptych.cli import ports
from triptych.cli.child import child_command

_START_S = 600.0
_STOP_S = 20.0
_POLL_S = 0.5
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class Vllm:
    """How every vLLM of a run is started."""

    model: Path
    model_id: str
    arguments: tuple[str, ...]
    log_dir: Path

    @asynccontextmanager
    async def serve(self, name: str, threads: int, *arguments: str) -> AsyncGenerator[str]:
        """One server's URL."""
        port = ports.free(1)[0]
        command = (
            *("vllm.entrypoints.cli.main", "serve", str(self.model), "--served-model-name", self.model_id),
            *("--host", ports.HOST, "--port", str(port), "--dtype", "float32"),
            *("--limit-mm-per-prompt", json.dumps({"image": 8, "video": 0}), *self.arguments, *arguments),
        )
        with TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as sockets:  # vLLM leaves them
            environment = {**_ENVIRONMENT, "OMP_NUM_THREADS": str(threads), "VLLM_RPC_BASE_PATH": sockets}
            async with _process(command, environment, self.log_dir / f"{name}.log") as process:
                yield await _until_healthy(name, port, process)

    @asynccontextmanager
    async def disaggregated(self, threads: int) -> AsyncGenerator[str]:
        """The URL of a proxy before an encoder and a text server that share files, as vLLM's example has it."""
        files = self.log_dir / "embeddings"
        files.mkdir()
        async with AsyncExitStack() as stack:
            servers = (
                self.serve("vllm-encoder", threads, "--no-enable-prefix-caching", *_example(files, "ec_producer")),
                self.serve("vllm-text", threads, *_example(files, "ec_consumer")),
            )
            urls = [await stack.enter_async_context(server) for server in servers]
            port = ports.free(1)[0]
            proxy = ("benchmarks.encode_proxy", str(port), *urls)
            process = await stack.enter_async_context(_process(proxy, {}, self.log_dir / "proxy.log"))
            yield await _until_healthy("the proxy", port, process)
            if not any(files.iterdir()):
                raise RuntimeError("vLLM's encoder has stored no embedding: the text server encoded by itself")


def _example(files: Path, role: str) -> tuple[str, str]:
    config = {
        "ec_connector": "ECExampleConnector",
        "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": str(files)},
    }
    return "--ec-transfer-config", json.dumps(config)


@asynccontextmanager
async def _process(
    command: Sequence[str], environment: dict[str, str], log: Path
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A module in a session of its own, with all that it starts; what is left of it is killed at the end."""
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *child_command(*command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},  # noqa: TID251 - passed to the child
            start_new_session=True,
        )
    try:
        yield process
    except BaseException as error:
        error.add_note(_tail(log))
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await process.wait()
                while group_runs(process.pid):  # noqa: ASYNC110 - its processes remove their shared memory after it
                    await asyncio.sleep(_POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def group_runs(group: int) -> bool:
    """Whether a process group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _tail(log: Path) -> str:
    return f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}"


async def _until_healthy(name: str, port: int, process: asyncio.subprocess.Process) -> str:
    url = f"http://{ports.address(port)}"
    async with httpx.AsyncClient(trust_env=False) as client:
        try:
            async with asyncio.timeout(_START_S):
                while True:
                    with contextlib.suppress(httpx.HTTPError):
                        if (await client.get(f"{url}/health")).is_success:
                            return url
                    if process.returncode is not None:
                        raise RuntimeError(f"{name} ended while it started")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise RuntimeError(f"{name} does not answer") from None
