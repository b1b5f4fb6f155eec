"""Which sequences of a text instance run in its next step, and how far (HydraInfer, algorithm 1).

Ongoing decodes go first, so that a new prompt never delays the next token of an answer by more than one step. What
the token budget then leaves goes to prompts that are already being prefilled, in the order in which they came, and
after them to prompts that wait. The budget bounds the time of a step, and with it the time between two tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt of which ``tokens`` positions are not computed yet (as an order: are to be computed now)."""

    request_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: one token for each of ``decodes``, then ``prefills`` in their order.

    A prefill that still has to be given memory and does not get it takes all that stand behind it out of the plan:
    first come, first served.
    """

    decodes: tuple[str, ...]
    prefills: tuple[Prefill, ...]

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(prefill.tokens for prefill in self.prefills)


def plan_step(
    decoding: Sequence[str],
    prefilling: Sequence[Prefill],
    waiting: Iterable[Prefill],
    *,
    token_budget: int,
    max_sequences: int,
) -> StepPlan:
    """Fill one step.

    ``decoding`` and ``prefilling`` hold memory already and ``waiting`` holds none, each in order of arrival. All of
    ``decoding`` run; callers keep ``max_sequences <= token_budget`` so that they fit.
    """
    left = token_budget - len(decoding)
    places = max_sequences - len(decoding) - len(prefilling)
    prefills: list[Prefill] = []
    for work in prefilling:
        if left <= 0:
            break
        prefills.append(Prefill(work.request_id, min(work.tokens, left)))
        left -= prefills[-1].tokens
    for work in waiting:
        if left <= 0 or places <= 0:
            break
        prefills.append(Prefill(work.request_id, min(work.tokens, left)))
        left -= prefills[-1].tokens
        places -= 1
    return StepPlan(tuple(decoding), tuple(prefills))
