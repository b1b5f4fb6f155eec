"""NIXL's agent: what is made once and registered, and what its bindings are called. Nothing here runs on its own."""

import logging
import os
from collections.abc import Callable
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

from triptych.ports import Arena

_PROGRESS_DELAY_US = 20_000
"""Of NIXL's progress thread, which wakes up by itself for events. 0, its wrapper's value, burns a whole core."""


def has_rdma() -> bool:
    """Whether this host has an RDMA device."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def set_ucx_defaults(*, rdma: bool) -> None:
    """Choose how UCX works before it is loaded; what the operator has set stays.

    Reads that no hardware and no kernel does, UCX has the holder's process answer by messages, and aborts that process
    when a reader dies before all are sent: such reads are refused. Without RDMA hardware its verbs modules are useless,
    and can crash the process at exit.
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
        # Its package sets up a handler that prints to stdout: what it logs goes where everything goes.
        log = logging.getLogger("nixl")
        log.handlers.clear()
        log.propagate = True
        log.setLevel(logging.WARNING)
        return bindings
    raise RuntimeError("the NIXL transport needs the extra 'ucx'")


def segment(nixl: Any, device: int | None) -> Any:
    """NIXL's name for the kind of memory: on the host, or on a CUDA device."""
    return nixl.DRAM_SEG if device is None else nixl.VRAM_SEG


def agent_name(probe: bytes, incarnation: int) -> str:
    """Unique for an incarnation of an instance's agent, and derived, so that no peer can take another's name by accident."""
    return blake2b(probe + incarnation.to_bytes(4, "little"), digest_size=16, person=b"triptych-nixl").hexdigest()


class NixlAgent:
    """An agent, its UCX backend, and the registration of the arena. ``incarnation``: how many were made before it."""

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
        """All that the bindings raise."""
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
"""Makes an agent, blocking; raises RuntimeError. ``NixlAgent`` is one."""
