"""A text service whose engine is held before a token: ``python -m tests.e2e.held_text FILE ARGUMENT...``.

No answer gets more tokens than the file says. While the engine is held there is a file beside it (``held``).
"""

import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.engine.decoder import text_engine

LOOK_S = 0.001


def held(limit: Path) -> Path:
    return limit.with_suffix(".held")


class HeldEngine(text_engine.TransformersTextEngine):
    """Before a step in which an answer would get a token too many, it waits."""

    limit: Path

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._given: dict[str, int] = {}
        """Tokens by request, for one choice."""
        self._is_measured = False
        super().__init__(*arguments, **options)
        self._is_measured = True

    def add(self, request: EngineRequest) -> None:
        super().add(request)
        self._given[request.request_id] = max(map(len, request.begun.values()))

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        super().cancel(request_id, choice)
        self._given.pop(request_id, None)

    def decode_step(self) -> list[EngineOutput]:
        return self._once_it_may(super().decode_step)

    def step(self) -> list[EngineOutput]:
        return self._once_it_may(super().step)

    def _once_it_may(self, step: Callable[[], list[EngineOutput]]) -> list[EngineOutput]:
        while self._is_measured and any(given >= int(self.limit.read_text()) for given in self._given.values()):
            held(self.limit).touch()
            time.sleep(LOOK_S)
        outputs = step()
        for output in outputs:
            given = self._given.pop(output.request_id, None)
            if given is not None and output.finish_reason is None:
                self._given[output.request_id] = given + len(output.token_ids)
        return outputs


if __name__ == "__main__":
    HeldEngine.limit = Path(sys.argv.pop(1))
    text_engine.TransformersTextEngine = HeldEngine  # type: ignore[misc]
    runpy.run_module("triptych.services.text", run_name="__main__", alter_sys=True)
