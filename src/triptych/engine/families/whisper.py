"""Whisper: all positions of a prompt and its answer attend to the states of its clip."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedModel

from triptych.domain.embedding import TensorSpec
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.decoder.cross_attention import (
    CROSS_ATTENTION,
    CrossCache,
    CrossPass,
    CrossStates,
    KeysValues,
    Zone,
    cross_parts,
)
from triptych.engine.families.adapters import Features, ForwardPart, PlacedItem, PromptPlan
from triptych.engine.families.audio_features import WhisperFeatures
from triptych.engine.families.plain import PlainDecoder
from triptych.engine.media.item import MediaItem
from triptych.engine.tensors import domain_dtype
from triptych.errors import InvalidRequest
from triptych.families.model_files import BadModel
from triptych.families.whisper import STATES, Whisper


class WhisperEncoder:
    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self._model: Any = model
        self._extractor = WhisperFeatures(checkpoint.files)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._extractor.settings

    def prepare(self, item: MediaItem) -> Features:
        return self._extractor.extract(item, padding="max_length")

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        spectra = torch.stack([features["input_features"] for features in batch])
        spectra = spectra.to(device=self._model.device, dtype=self._model.dtype)
        return [(states,) for states in self._model.model.encoder(spectra).last_hidden_state]


class WhisperDecoder(PlainDecoder):
    """Prompts without a clip, as those of measurements, attend to nothing."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        super().__init__(model, checkpoint)
        if not isinstance(checkpoint.family, Whisper):
            raise BadModel(f"{checkpoint.family.model_type} is not Whisper")
        decoder: Any = self.decoder
        config = decoder.config  # whose usual names are those of the encoder's sizes
        config.num_hidden_layers, config.num_attention_heads = config.decoder_layers, config.decoder_attention_heads
        for layer in decoder.layers:  # self-attention uses packed attention, by the shared configuration
            layer.encoder_attn.config = copy(config)
            layer.encoder_attn.config._attn_implementation = CROSS_ATTENTION  # noqa: SLF001 - transformers' documented switch
        self._cache = CrossCache(layers=len(decoder.layers), project=_keys_values)
        spec = TensorSpec(STATES, domain_dtype(model.dtype), (checkpoint.family.states, checkpoint.family.hidden_size))
        self._specs = (spec,)
        generation = model.generation_config
        self._begun = Transcript.after_prompt(generation, config.vocab_size)
        self._unbegun = self._begun
        if checkpoint.family.languages:
            self._unbegun = self._begun.after_language(generation, config.vocab_size)

    def keep_at_most(self, nbytes: int) -> None:
        self._cache.nbytes = nbytes

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        return tokens == 1 and tuple(tensors) == self._specs

    def plan(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> PromptPlan:
        if not items:
            return PromptPlan()
        if len(items) > 1:
            raise InvalidRequest(f"the model transcribes one clip per request; this one has {len(items)}")
        states = items[0].tensors[STATES]
        ends_with_clip = items[0].positions[0] == len(token_ids) - 1
        return PromptPlan(
            grammar=self._unbegun if ends_with_clip else self._begun,
            extra=CrossStates(states, (Zone(0, 0, len(states)),)),
        )

    @property
    def looks_ahead(self) -> bool:
        return True

    @property
    def supports_cuda_graphs(self) -> bool:
        """False: the states that a position attends to are looked up in every pass."""
        return False

    def inputs(self, parts: Sequence[ForwardPart], rows: int) -> Mapping[str, Any]:  # noqa: ARG002
        cross = [
            cross_part
            for part in parts
            if isinstance(part.plan.extra, CrossStates)
            for cross_part in cross_parts(part.plan.extra, part.first, part.count, part.row)
        ]
        weights: Any = self._model.proj_out.weight
        return {
            "cross": CrossPass(self._cache, cross),
            "encoder_hidden_states": weights.new_zeros(1, 1, self._hidden_size),
        }

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.proj_out(hidden)
        return logits


@dataclass(frozen=True, slots=True)
class _Masks:
    """Bitmasks of ``vocabulary`` tokens, least significant bit first."""

    vocabulary: int

    def only(self, token_ids: Iterable[int]) -> bytes:
        allowed = np.zeros(self.vocabulary, dtype=np.bool_)
        allowed[list(token_ids)] = True
        return np.packbits(allowed, bitorder="little").tobytes()

    def without(self, token_ids: Iterable[int]) -> bytes:
        return self.only(set(range(self.vocabulary)).difference(token_ids))


@dataclass(slots=True)
class Transcript:
    """``domain.engine.TokenGrammar`` of a transcript, as ``generate`` restricts it: ``beginning`` has a mask for each of the first tokens.

    No combination of tokens is refused: those of an answer that goes on are taken as they are.
    """

    beginning: tuple[bytes, ...]
    rest: bytes
    accepted: int = 0

    @classmethod
    def after_prompt(cls, generation: Any, vocabulary: int) -> Self:
        """For a prompt that names language and task, or an English-only model."""
        masks = _Masks(vocabulary)
        suppressed = set(generation.suppress_tokens or ())
        at_first = suppressed.union(generation.begin_suppress_tokens or ())
        return cls((masks.without(at_first),), masks.without(suppressed))

    def after_language(self, generation: Any, vocabulary: int) -> Self:
        """For a prompt that ends with the clip: its language, transcription without timestamps, and then this.

        Raises BadModel if ``generation`` does not name the tokens of tasks.
        """
        try:
            fixed = (generation.task_to_id["transcribe"], generation.no_timestamps_token_id)
        except (AttributeError, KeyError) as error:
            raise BadModel(f"generation_config.json has lang_to_id, but no {error}") from error
        masks = _Masks(vocabulary)
        prompt = (masks.only(generation.lang_to_id.values()), *(masks.only([token]) for token in fixed))
        return replace(self, beginning=(*prompt, *self.beginning))

    def fork(self) -> Self:
        return replace(self)

    def allowed(self) -> bytes:
        return self.beginning[self.accepted] if self.accepted < len(self.beginning) else self.rest

    def accept(self, token_id: int) -> None:  # noqa: ARG002
        self.accepted += 1


def _keys_values(layer: Any, states: torch.Tensor) -> KeysValues:
    shape = (len(states), layer.num_heads, layer.head_dim)
    return layer.k_proj(states).view(shape).transpose(0, 1), layer.v_proj(states).view(shape).transpose(0, 1)
