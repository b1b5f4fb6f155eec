"""A model's processor in the process of an engine, which has torch and transformers; loaded only where it is needed."""

from triptych.families.generic import ItemProcessing
from triptych.families.model_files import ModelFiles


def process_here(files: ModelFiles) -> ItemProcessing:
    """``families.generic.StartProcessing``."""
    from triptych.engine.families.item_processor import ItemProcessor  # needs torch

    return ItemProcessor(files)
