"""Stages of a request's life, and the roles that instances play in them."""

from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Self


class Stage(Enum):
    """One of the three stages that scale apart (HydraInfer section 2; EPD-Serve section 2.1)."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"

    __hash__ = object.__hash__  # a member is one object; Enum's own hash is computed anew in Python for every look-up


class Role(Enum):
    """The set of stages that one instance serves, written as their first letters."""

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
        """The role with exactly these stages. Raises ValueError for none."""
        return cls("".join(stage.name[0] for stage in Stage if stage in stages))

    def serves(self, *stages: Stage) -> bool:
        """Whether it has all of these stages."""
        return self.stages.issuperset(stages)
