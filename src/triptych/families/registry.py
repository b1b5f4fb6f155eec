"""Which family serves which architecture."""

from collections.abc import Mapping

from triptych.families.base import Family
from triptych.families.llava import Llava
from triptych.families.model_files import BadModel, ModelFiles

FAMILIES: Mapping[str, type[Family]] = {"llava": Llava}
"""By ``model_type`` of ``config.json``."""


def load_family(files: ModelFiles) -> Family:
    """The family of a model directory. Raises BadModel for an architecture that is not known."""
    family = FAMILIES.get(files.model_type)
    if family is None:
        raise BadModel(
            f"model_type {files.model_type!r} is not known; known are: {', '.join(sorted(FAMILIES))}. To add one, write "
            "a class that satisfies triptych.families.base.Family and name it in triptych.families.registry.FAMILIES"
        )
    return family.load(files)
