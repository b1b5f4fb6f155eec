"""The family of each architecture."""

from collections.abc import Mapping
from typing import cast

from triptych.families.base import Family, WrittenFamily
from triptych.families.gemma3 import Gemma3
from triptych.families.generic import GenericFamily, StartProcessing
from triptych.families.granite_speech import GraniteSpeech
from triptych.families.idefics3 import Idefics3
from triptych.families.internvl import InternVl
from triptych.families.llava import Llava
from triptych.families.llava_next import LlavaNext
from triptych.families.llava_onevision import LlavaOneVision
from triptych.families.mllama import Mllama
from triptych.families.model_files import BadModel, ModelFiles
from triptych.families.qwen2_audio import Qwen2Audio
from triptych.families.qwen2_vl import Qwen2VL
from triptych.families.qwen3_vl import Qwen3VL
from triptych.families.voxtral import Voxtral
from triptych.families.whisper import Whisper
from triptych.plugins import BadPlugin, plugin, plugin_names

PLUGINS = "triptych.families"

FAMILIES: Mapping[str, type[WrittenFamily]] = {
    "gemma3": Gemma3,
    "granite_speech": GraniteSpeech,
    "idefics3": Idefics3,
    "internvl": InternVl,
    "llava": Llava,
    "llava_next": LlavaNext,
    "llava_onevision": LlavaOneVision,
    "mllama": Mllama,
    "qwen2_5_vl": Qwen2VL,
    "qwen2_audio": Qwen2Audio,
    "qwen2_vl": Qwen2VL,
    "qwen3_vl": Qwen3VL,
    "smolvlm": Idefics3,
    "voxtral": Voxtral,
    "whisper": Whisper,
}
"""Families by ``model_type`` of ``config.json``."""


def written_family(files: ModelFiles) -> Family:
    """The family of a model directory, here or in a plug-in. Raises BadModel for an architecture without one."""
    family = _family_class(files.model_type)
    if family is None:
        raise BadModel(_unknown(files))
    return family.load(files)


def load_family(files: ModelFiles, process: StartProcessing) -> Family:
    """The family of a model directory; ``process`` loads the processor of a model without a family here.

    Raises BadModel for an architecture that transformers does not know either, or of which its processor says too little.
    """
    family = _family_class(files.model_type)
    if family is not None:
        return family.load(files)
    try:
        return GenericFamily(process(files))
    except BadModel as error:
        raise BadModel(f"{_unknown(files)}. Nor can its processor in transformers serve it: {error}") from error


def model_plugin(group: str, model_type: str) -> object | None:
    """What a plug-in offers in a group for a type of models. Raises BadModel for one that cannot be used."""
    try:
        return plugin(group, model_type)
    except BadPlugin as error:
        raise BadModel(str(error)) from error


def _family_class(model_type: str) -> type[WrittenFamily] | None:
    """Raises BadModel for a plug-in that cannot be used."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    family = model_plugin(PLUGINS, model_type)
    if family is not None and not callable(getattr(family, "load", None)):
        raise BadModel(f"{model_type!r} of a plug-in is no family, but {family!r}")
    return cast("type[WrittenFamily] | None", family)


def _unknown(files: ModelFiles) -> str:
    own_code = "; the code in its directory (auto_map) is not run" if files.config.get("auto_map") else ""
    return (
        f"model_type {files.model_type!r} is not known{own_code}; known are: {', '.join(sorted({*FAMILIES, *plugin_names(PLUGINS)}))}. "
        "To add one, write a class that satisfies triptych.families.base.Family and name it in "
        "triptych.families.registry.FAMILIES or in a package's entry points, as docs/adding_a_family.md shows"
    )
