"""Response formats within vLLM: its scheduler asks Triptych's grammars for the tokens that are allowed next."""

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

from triptych.errors import EngineFailure, TriptychError
from triptych.ports import TokenGrammar

logger = logging.getLogger(__name__)

_BITS = 32


class ConstrainedChoice(StructuredOutputGrammar):
    """Grammar of one choice. vLLM's engine would end with an exception, so a failure is kept, and ends the choice."""

    def __init__(
        self, grammar: TokenGrammar, end_ids: AbstractSet[int], min_tokens: int, begun: Sequence[int] = ()
    ) -> None:
        """``end_ids`` are not allowed before ``min_tokens`` tokens, unless the grammar allows nothing else.

        ``begun``: the answer's tokens so far. Raises what the grammar raises on them.
        """
        self._grammar = grammar
        self._end_ids = end_ids
        self._min_tokens = min_tokens
        for token in begun:
            grammar.accept(token)
        self._accepted = len(begun)
        self._is_over = False
        self.error: TriptychError | None = None

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Write the allowed tokens to a row [vocabulary / 32] of int32, least significant bit first."""
        row = bitmask[batch_index]
        try:
            mask = self._allowed(row.numel() * row.element_size())
        except Exception as error:  # noqa: BLE001 - reported with the choice
            self._fail(error)
            row.fill_(-1)
        else:
            row.copy_(torch.from_numpy(mask.view(np.int32)))

    def _allowed(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        allowed = np.frombuffer(self._grammar.allowed()[:nbytes].ljust(nbytes, b"\0"), dtype=np.uint8).copy()
        if self._accepted < self._min_tokens:
            later = allowed.copy()
            for token in self._end_ids:
                later[token // 8] &= ~np.uint8(1 << token % 8)
            allowed = later if later.any() else allowed
        if not allowed.any():
            raise EngineFailure("the response format leaves no token")
        return allowed

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:  # noqa: ARG002
        """Advance by tokens that were sampled. False ends the choice with an error."""
        if self.error is not None:
            return False
        if self._is_over:
            return True
        try:
            for token in tokens:
                self._grammar.accept(token)
                self._accepted += 1
                self._is_over = self._is_over or token in self._end_ids
        except Exception as error:  # noqa: BLE001 - reported with the choice
            self._fail(error)
            return False
        return True

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, TriptychError):
            logger.error("a grammar failed", exc_info=error)
            error = EngineFailure("the response format could not be followed")
        self.error = error

    def is_terminated(self) -> bool:
        return self._is_over

    def validate_tokens(self, tokens: list[int]) -> list[int]:  # noqa: ARG002
        raise AssertionError("only for speculative decoding, which is refused")

    def rollback(self, num_tokens: int) -> None:  # noqa: ARG002
        raise AssertionError("only for speculative decoding, which is refused")

    def reset(self) -> None:
        raise AssertionError("a grammar serves one choice")


class Grammars(StructuredOutputBackend):
    """vLLM's backend for response formats: the grammars are compiled already, and known by name."""

    def __init__(self, vllm_config: Any, vocabulary: int) -> None:
        super().__init__(vllm_config, None, vocabulary)
        self._named: dict[str, ConstrainedChoice] = {}

    def put(self, name: str, grammar: ConstrainedChoice) -> None:
        """Know a grammar until ``drop``."""
        self._named[name] = grammar

    def drop(self, name: str) -> TriptychError | None:
        """Forget a grammar. Returns why it failed, if it did. Unknown ones are ignored."""
        grammar = self._named.pop(name, None)
        return None if grammar is None else grammar.error

    def compile_grammar(
        self,
        request_type: Any,  # noqa: ARG002
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,  # noqa: ARG002
    ) -> ConstrainedChoice:
        return self._named[grammar_spec]

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return torch.full((max_num_seqs, -(-self.vocab_size // _BITS)), -1, dtype=torch.int32)

    def destroy(self) -> None:
        self._named.clear()
