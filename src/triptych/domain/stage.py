"""Stages of a request's life, and the roles that instances play in them."""

from enum import Enum


class Stage(Enum):
    """One of the three panels (HydraInfer section 2; EPD-Serve section 2.1)."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class Role(Enum):
    """The set of stages that one instance serves."""

    E = frozenset({Stage.ENCODE})
    P = frozenset({Stage.PREFILL})
    D = frozenset({Stage.DECODE})
    PD = frozenset({Stage.PREFILL, Stage.DECODE})
    EP = frozenset({Stage.ENCODE, Stage.PREFILL})
    ED = frozenset({Stage.ENCODE, Stage.DECODE})
    EPD = frozenset({Stage.ENCODE, Stage.PREFILL, Stage.DECODE})

    @property
    def stages(self) -> frozenset[Stage]:
        return self.value

    def serves(self, stage: Stage) -> bool:
        return stage in self._value_  # asked for every instance at every event: without the descriptor of ``value``
