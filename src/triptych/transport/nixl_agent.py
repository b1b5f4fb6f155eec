"""NIXL's agent: creation, registration, and access to the bindings. Nothing here runs on its own."""

import logging
import os
from collections.abc import Callable
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

from triptych.ports import Arena

_PROGRESS_DELAY_US = 20_000
"""Poll interval of NIXL's progress thread, which also wakes up for events. The wrapper's default, 0, burns a core."""


def has_rdma() -> bool:
    """Whether this host has an RDMA device."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def set_ucx_defaults(*, rdma: bool) -> None:
    """Set UCX's environment before it is loaded, without overriding the operator's settings.

    Emulated reads are disabled: there UCX makes the holder's process answer by messages, and aborts it when a reader
    dies midway. Without RDMA hardware the verbs modules are disabled: they are useless and can crash the process at
    exit.
    """
    os.environ.setdefault("UCX_PROTO_EMULATION_ENABLE", "n")  # noqa: TID251 - UCX has no other switch
    if not rdma:
        os.environ.setdefault("UCX_MODULES", "^ib,ib_mlx5,ib_efa,mlx5")  # noqa: TID251 - UCX has no other switch


def load_bindings() -> Any:
    """NIXL's binding module. Raises RuntimeError when it is not installed."""
    for package in ("nixl_cu12", "nixl_cu13"):
        try:
            bindings = import_module(f"{package}._bindings")
        except ModuleNotFoundError:
            continue
        # Its package installs a handler that prints to stdout; use the process's own logging instead.
        log = logging.getLogger("nixl")
        log.handlers.clear()
        log.propagate = True
        log.setLevel(logging.WARNING)
        return bindings
    raise RuntimeError("the NIXL transport needs the extra 'ucx'")


def segment(nixl: Any, device: int | None) -> Any:
    """NIXL's memory type for host memory or a CUDA device."""
    return nixl.DRAM_SEG if device is None else nixl.VRAM_SEG


def agent_name(probe: bytes, incarnation: int) -> str:
    """Unique per incarnation of an instance's agent, and derived from it, so that no two peers share a name by
    accident.
    """
    return blake2b(probe + incarnation.to_bytes(4, "little"), digest_size=16, person=b"triptych-nixl").hexdigest()


class NixlAgent:
    """An agent, its UCX backend, and the registered arena. ``incarnation`` counts the agents before it."""

    def __init__(self, arena: Arena, incarnation: int) -> None:
        """Takes about 0.2 s. Raises RuntimeError when NIXL is not installed or UCX does not start."""
        rdma = has_rdma()
        set_ucx_defaults(rdma=rdma)
        nixl = load_bindings()
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.captureTelemetry = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = _PROGRESS_DELAY_US
        errors = [error for error in vars(nixl).values() if isinstance(error, type) and issubclass(error, Exception)]
        self.errors: tuple[type[Exception], ...] = (*errors, RuntimeError)
        """Exception types that the bindings raise."""
        self.nixl = nixl
        self.rdma = rdma
        self.incarnation = incarnation
        region = arena.region
        try:
            self.agent = nixl.nixlAgent(agent_name(arena.probe, incarnation), config)
            self.ucx = int(self.agent.createBackend("UCX", {}))
            parts = [(region.address, region.nbytes, region.device or 0, "")]
            self.agent.registerMem(nixl.nixlRegDList(segment(nixl, region.device), parts), [self.ucx])
            self.metadata = bytes(self.agent.getLocalMD())
        except self.errors as error:
            raise RuntimeError(f"NIXL could not start UCX ({type(error).__name__})") from error


OpenAgent = Callable[[Arena, int], NixlAgent]
"""Creates an agent, blocking; raises RuntimeError. ``NixlAgent`` is one."""
