"""Start of vLLM in this process, as text engine or encoder, and its identity."""

import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from triptych.domain.profile import ProfileIdentity
from triptych.domain.reasons import reason_of
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.engine.part_identity import part_identity
from triptych.integrations.vllm.arguments import cost_options, engine_args
from triptych.integrations.vllm.models import register_changes
from triptych.integrations.vllm.release import SUPPORTED
from triptych.integrations.vllm.statistics import SchedulerTotals
from triptych.runtime.process import CannotStart

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX has it on Linux


@dataclass(frozen=True, slots=True)
class Started:
    """VLLM's engine and what it has made of its arguments."""

    engine: LLMEngine
    config: VllmConfig
    identity: ProfileIdentity
    eos_ids: frozenset[int]
    totals: SchedulerTotals
    """Totals of the engine's steps."""
    rendezvous: str
    """The file by which workers on a CPU find each other; their shared memory is named after it. Empty elsewhere."""

    def close(self) -> None:
        """End the workers, and remove what one leaves that was killed."""
        core: Any = self.engine.engine_core
        core.shutdown()
        if self.rendezvous:
            for left in (Path(gettempdir(), self.rendezvous), *_SHARED_MEMORY.glob(f"{self.rendezvous}-*")):
                left.unlink(missing_ok=True)


def start(
    arguments: str, checkpoint: Checkpoint, *, model_id: str, compute: ComputeOptions, transfers_kv: bool = False
) -> Started:
    """``arguments`` is a command line. ``transfers_kv``: with the KV connector. Raises CannotStart for what vLLM refuses, or a model
    that it cannot load.
    """
    for name, value in _environment(compute).items():
        os.environ.setdefault(name, value)  # noqa: TID251 - vLLM has no other settings for all of its processes
    parsed = engine_args(arguments, checkpoint, model_id=model_id, compute=compute, transfers_kv=transfers_kv)
    register_changes([checkpoint.architecture])
    # vLLM imports it in the first step with a response format, which would wait for seconds.
    importlib.import_module("xgrammar")
    totals = SchedulerTotals(None)
    with starting():
        config = parsed.create_engine_config(UsageContext.OPENAI_API_SERVER)  # with the defaults of ``vllm serve``
        if config.parallel_config.world_size == 1:
            # Elsewhere vLLM has a process for its worker only if there are several.
            config.parallel_config.distributed_executor_backend = "uni"
        with _sockets(config):
            engine = LLMEngine(
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_stats=True,
                stat_loggers=[lambda *_: totals],
                multiprocess_mode=False,
            )
        (rendezvous, *_) = engine.collective_rpc(_rendezvous)
    model: Any = config.model_config
    return Started(
        engine,
        config,
        vllm_identity(
            checkpoint,
            ModelPart.DECODER,
            compute,
            options=cost_options(arguments),
            tensor_parallel=int(config.parallel_config.tensor_parallel_size),
        ),
        _eos_ids(model.try_get_generation_config(), model.hf_text_config),
        totals,
        rendezvous,
    )


@contextmanager
def starting() -> Iterator[None]:
    """Within it vLLM starts: what it refuses, or cannot load, is CannotStart."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # noqa: TID251 - vLLM has no other switch for all of its processes
    _join_logs()
    try:
        yield
    except Exception as error:
        logger.exception("vLLM cannot start")
        raise CannotStart(f"engine vllm: {reason_of(error)}") from None
    _join_logs()


@contextmanager
def _sockets(config: VllmConfig) -> Iterator[None]:
    """Names of the sockets of several workers are needed only until they are connected; vLLM would leave them."""
    if config.parallel_config.world_size == 1:
        yield
        return
    name = "VLLM_RPC_BASE_PATH"
    base = os.environ.get(name)  # noqa: TID251 - an operator's
    with TemporaryDirectory(prefix="vllm-", dir=base, ignore_cleanup_errors=True) as folder:
        os.environ[name] = folder  # noqa: TID251 - vLLM has no other setting for all of its processes
        yield


def _rendezvous(worker: Any) -> str:  # noqa: ARG001
    """Runs in each worker."""
    return os.environ.get("VLLM_DIST_IDENT", "")  # noqa: TID251 - set by vLLM


def _environment(compute: ComputeOptions) -> Mapping[str, str]:
    """Variables that vLLM reads of its workers, where the operator has not set them."""
    # This process has threads, which a forked worker would lack.
    variables = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if current_platform.is_cpu():
        # By default vLLM binds each worker to a NUMA node, and does not start where there are fewer.
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(compute.torch_threads)}
    return variables


def vllm_identity(
    checkpoint: Checkpoint, part: ModelPart, compute: ComputeOptions, *, options: str, tensor_parallel: int = 1
) -> ProfileIdentity:
    """``options`` are the arguments that change costs, in one form."""
    device = str(current_platform.device_type)
    hardware = compute.hardware or ("" if current_platform.is_cpu() else str(current_platform.get_device_name()))
    identity = part_identity(checkpoint, part, replace(compute, device=device, hardware=hardware))
    return replace(
        identity,
        tensor_parallel=tensor_parallel,
        software=f"{identity.software} vllm/{SUPPORTED}",
        options={**identity.options, "vllm": options},
    )


def _eos_ids(generation: Mapping[str, Any], text: Any) -> frozenset[int]:
    """The end tokens of ``generation_config.json``, or of the language model's configuration."""
    ids = generation.get("eos_token_id", getattr(text, "eos_token_id", None))
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _join_logs() -> None:
    """Let vLLM's log lines take the form of this process's own."""
    log = logging.getLogger("vllm")
    log.handlers.clear()
    log.propagate = True
