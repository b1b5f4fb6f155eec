"""Whisper: a clip is one prompt position, the token that begins a transcript; all text attends to the clip's states."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.media import MediaInfo, Modality
from triptych.errors import InvalidMedia
from triptych.families.audio_window import Window
from triptych.families.base import Placeholders, PromptReplacement, refuse_unless
from triptych.families.defaults import WHISPER_DEFAULTS
from triptych.families.fields import integer
from triptych.families.model_files import BadModel, Json, ModelFiles
from triptych.families.plain import Plain

STATES = "states"
"""Name of the tensor [frames, hidden size] that the decoder attends to."""

_TEMPLATE = """
{%- set prompt = namespace(before='', clip=false, after='') -%}
{%- for message in messages -%}
  {%- for part in message['content'] -%}
    {%- if part['type'] == 'audio' -%}
      {%- set prompt.clip = true -%}
    {%- elif prompt.clip -%}
      {%- set prompt.after = prompt.after + ' ' + part['text'] -%}
    {%- else -%}
      {%- set prompt.before = prompt.before + ' ' + part['text'] -%}
    {%- endif -%}
  {%- endfor -%}
{%- endfor -%}
{%- if prompt.before.strip() -%}
  {{- '<|startofprev|> ' + prompt.before.strip() -}}
{%- endif -%}
{%- if prompt.clip -%}
  {{- '<|startoftranscript|>' -}}
  {%- set words = prompt.after.split() -%}
  {%- set task = (words + ['transcribe', 'transcribe'])[1] -%}
  {%- if words and (words[0] not in languages or task not in ['transcribe', 'translate'] or words|length > 2) -%}
    {{- raise_exception("after the clip there can only be a language of the model and a task, as in 'fr' or 'fr translate'") -}}
  {%- elif words -%}
    {{- '<|' + words[0] + '|><|' + task + '|><|notimestamps|>' -}}
  {%- elif not languages -%}
    {{- '<|notimestamps|>' -}}
  {%- endif -%}
{%- endif -%}
"""
"""Chat template, which needs ``languages``: text before the clip is what was said before it, text after it language and task."""


@dataclass(frozen=True, slots=True)
class Whisper(Plain):
    """A clip fills one ``window``, of which the encoder makes ``states`` rows. Without ``languages`` the model is English-only."""

    modality: ClassVar = Modality.AUDIO

    window: Window
    states: int
    languages: tuple[str, ...]
    model_type: str = "whisper"

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        config = {**WHISPER_DEFAULTS, **files.config}
        start = integer(config, "decoder_start_token_id")
        generated = files.generation_config.get("decoder_start_token_id", start)
        if generated != start:
            raise BadModel(f"decoder_start_token_id is {start} in config.json, {generated!r} in generation_config.json")
        return cls(
            placeholder_id=start,
            hidden_size=integer(config, "d_model"),
            context_length=integer(config, "max_target_positions"),
            window=Window.load(files, config),
            states=integer(config, "max_source_positions"),
            languages=_languages(files.generation_config),
        )

    @property
    def sample_rate_hz(self) -> int:
        return self.window.sample_rate_hz

    @property
    def chat_template(self) -> str:
        return f"{{%- set languages = {json.dumps(self.languages)} -%}}{_TEMPLATE}"

    def together(self, infos: Sequence[MediaInfo]) -> tuple[MediaInfo, ...]:
        """Raises InvalidMedia unless there is one clip."""
        if len(infos) != 1:
            raise InvalidMedia(f"the model transcribes one clip per request; this one has {len(infos)}")
        return tuple(infos)

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        refuse_unless(info, Modality.AUDIO)
        if info.samples_at(self.sample_rate_hz) > self.window.samples:
            heard_s = self.window.samples / self.sample_rate_hz
            raise InvalidMedia(f"the clip takes {info.duration_s:.1f} s; the model hears up to {heard_s:g} s at once")
        return (Placeholders(self.placeholder_id, 1),)

    def outputs(self, info: MediaInfo, dtype: DType) -> tuple[TensorSpec, ...]:
        self.prompt_replacement(info)
        return (TensorSpec(STATES, dtype, (self.states, self.hidden_size)),)


def _languages(generation: Json) -> tuple[str, ...]:
    """Languages that a prompt can name (``en``), from those of ``generation_config.json`` (``<|en|>``)."""
    if not generation.get("is_multilingual", True):
        return ()
    tokens = generation.get("lang_to_id") or {}
    if not isinstance(tokens, dict):
        raise BadModel("lang_to_id of generation_config.json is not an object")
    return tuple(sorted(token.removeprefix("<|").removesuffix("|>") for token in tokens))
