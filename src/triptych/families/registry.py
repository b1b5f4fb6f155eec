"""The family of each architecture."""

from collections.abc import Mapping

from triptych.families.base import Family
from triptych.families.gemma3 import Gemma3
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

FAMILIES: Mapping[str, type[Family]] = {
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
}
"""Families by ``model_type`` of ``config.json``."""


def load_family(files: ModelFiles) -> Family:
    """The family of a model directory. Raises BadModel for an unknown architecture."""
    family = FAMILIES.get(files.model_type)
    if family is None:
        own_code = "; the code in its directory (auto_map) is not run" if files.config.get("auto_map") else ""
        raise BadModel(
            f"model_type {files.model_type!r} is not known{own_code}; known are: {', '.join(sorted(FAMILIES))}. To add one, write "
            "a class that satisfies triptych.families.base.Family and name it in triptych.families.registry.FAMILIES, as "
            "docs/adding_a_family.md shows"
        )
    return family.load(files)
