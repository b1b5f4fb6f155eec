"""The stages of a request, the parts of a model that compute them, and the roles of instances."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Self


class Stage(Enum):
    """The three stages that scale independently (HydraInfer section 2; EPD-Serve section 2.1)."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs in Python on every lookup


class ModelPart(Enum):
    """The encoder with its projector, or the decoder (the language model) with its head. Both are loaded apart."""

    ENCODER = "encoder"
    DECODER = "decoder"


class Role(Enum):
    """The set of stages that an instance serves, named by their first letters."""

    E = "E"
    P = "P"
    D = "D"
    PD = "PD"
    EP = "EP"
    ED = "ED"
    EPD = "EPD"

    stages: frozenset[Stage]

    def __init__(self, letters: str) -> None:
        self.stages = frozenset(stage for stage in Stage if stage.name[0] in letters)

    @classmethod
    def of(cls, stages: AbstractSet[Stage]) -> Self:
        """The role with exactly these stages. Raises ValueError if there is none."""
        return cls("".join(stage.name[0] for stage in Stage if stage in stages))

    def serves(self, *stages: Stage) -> bool:
        """Whether it includes all of these stages."""
        return self.stages.issuperset(stages)


INSTANCE_NAMES: Mapping[Role, str] = {
    Role.E: "encoder",
    Role.P: "prefill",
    Role.D: "decode",
    Role.PD: "text",
    Role.EP: "encode-prefill",
    Role.ED: "encode-decode",
    Role.EPD: "hybrid",
}
"""Beginnings of instances' names by role, in the order in which the instances start."""
