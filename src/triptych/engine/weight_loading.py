"""Load one part of a model: the media encoder with its projector, or the decoder with its head.

The model's class is subclassed and the other part removed in ``__init__``, which is free because ``from_pretrained``
builds on the meta device. The official loader reads shards and renames keys, so this module knows no architecture by
name.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from triptych.domain.embedding import DType
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import ADAPTER_CONFIG, Checkpoint
from triptych.engine.tensors import TORCH_DTYPES
from triptych.families.generic import GenericFamily
from triptych.families.model_files import BadModel

LANGUAGE_MODELS = ("language_model", "text_model", "model", "decoder")
"""Attribute names of the language model within the multimodal base model, over all architectures."""
HEADS = ("lm_head", "proj_out")
"""Attribute names of the head beside the base model."""
_FILLER = "embed_tokens_extend"
"""Attribute name of the towers in a language model that has them itself (Phi-4-multimodal)."""


class RemovedPart(nn.Identity):
    """Stands where a part is that is not loaded. Forward methods may read its device and data type, which its adapter sets."""

    device: torch.device
    dtype: torch.dtype


def base_of(model: nn.Module) -> nn.Module:
    """The module whose forward method takes items and calls the language model: the model itself, or what it heads."""
    inner = getattr(model, "model", None)
    has_language_model = any(hasattr(inner, name) for name in LANGUAGE_MODELS[:2])
    has_both = hasattr(inner, "encoder") and hasattr(inner, "decoder")
    return inner if isinstance(inner, nn.Module) and (has_language_model or has_both) else model


def language_model_name(base: nn.Module) -> str:
    """Attribute of ``base_of`` that is the language model. Raises BadModel."""
    name = next((name for name in LANGUAGE_MODELS if hasattr(base, name)), None)
    if name is None:
        raise BadModel(f"{type(base).__name__} has no language model apart from its encoders")
    return name


def filler_of(base: nn.Module) -> nn.Module | None:
    """The part of a language model that fills embeddings with items; None where the base model does."""
    filler: nn.Module | None = getattr(getattr(base, language_model_name(base)), _FILLER, None)
    return filler


def encoder_names(base: nn.Module) -> frozenset[str]:
    """Attributes of ``base_of`` that encode: whatever it has beside its language model and head."""
    return frozenset(name for name, _ in base.named_children()) - {language_model_name(base), *HEADS}


def load_part(checkpoint: Checkpoint, part: ModelPart, *, dtype: DType, device: torch.device) -> PreTrainedModel:
    """Load the part in eval mode, without reading the other into memory. Raises BadModel, also for quantized weights."""
    if part is ModelPart.DECODER and checkpoint.quantization is not None:
        raise BadModel(
            f"the language model's weights are quantized ({checkpoint.quantization}), which this engine does not compute: use --engine vllm"
        )
    quiet: Any = transformers_logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    whole: Any = getattr(transformers, checkpoint.architecture, None)
    if whole is None:
        raise BadModel(f"transformers {transformers.__version__} has no {checkpoint.architecture}")
    try:
        with _without_adapter(checkpoint.directory) as directory:
            keeps_projectors = isinstance(checkpoint.family, GenericFamily)
            model, report = _part_class(whole, part, keeps_projectors=keeps_projectors).from_pretrained(
                directory,
                config=_plain_config(whole, directory),
                dtype=TORCH_DTYPES[dtype],
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise BadModel(f"the {part.value} of the model cannot be loaded: {error}") from error
    for fault in ("missing_keys", "mismatched_keys"):
        if report[fault]:
            raise BadModel(
                f"the {part.value} of the model has {fault.replace('_', ' ')}: {sorted(map(str, report[fault]))}"
            )
    if checkpoint.quantization is not None:
        _refuse_quantized(model, report["unexpected_keys"], checkpoint.quantization)
    loaded: PreTrainedModel = model.eval().requires_grad_(False).to(device)
    return loaded


def _plain_config(whole: Any, directory: Path) -> Any:
    """The configuration without quantization, which published checkpoints apply to the language model alone."""
    config = whole.config_class.from_pretrained(directory)
    for section in (config, config.get_text_config()):
        if hasattr(section, "quantization_config"):
            del section.quantization_config
    return config


def _refuse_quantized(model: nn.Module, unused: Iterable[str], method: str) -> None:
    """Raises BadModel if the checkpoint has further tensors, such as scales, of modules whose weights were loaded."""
    modules = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    if scales := sorted(name for name in unused if name.rpartition(".")[0] in modules):
        raise BadModel(
            f"the encoder's weights are quantized ({method}), which is not supported: {', '.join(scales[:3])}"
        )


@contextmanager
def _without_adapter(directory: Path) -> Iterator[Path]:
    """The directory without its LoRA adapter.

    If peft is installed the loader would apply an adapter to every prompt, or fail because the encoder lacks its
    modules. Decoder adapters apply it themselves.
    """
    if not (directory / ADAPTER_CONFIG).is_file():
        yield directory
        return
    with TemporaryDirectory(prefix="triptych-model-") as view:
        for file in directory.iterdir():
            if file.name != ADAPTER_CONFIG:
                (Path(view) / file.name).symlink_to(file.resolve())
        yield Path(view)


def _part_class(whole: Any, part: ModelPart, *, keeps_projectors: bool) -> Any:
    keep_head = part is ModelPart.DECODER

    class Kept(whole):  # type: ignore[misc]  # a class chosen at run time
        # The encoder has neither of two tied weights.
        _tied_weights_keys = whole._tied_weights_keys if keep_head else {}  # noqa: SLF001 - the loader's own contract

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            if not keep_head:
                config.tie_word_embeddings = False
            super().__init__(config, *args, **kwargs)
            if not keep_head:
                for name in HEADS:
                    if hasattr(self, name):
                        setattr(self, name, nn.Identity())
            _drop_other_part(base_of(self), part, keeps_projectors=keeps_projectors)

        def get_output_embeddings(self) -> Any:
            return super().get_output_embeddings() if keep_head else None

    # The loader renames keys by the class's name; under another name weights would silently stay random.
    Kept.__name__, Kept.__qualname__, Kept.__module__ = whole.__name__, whole.__qualname__, whole.__module__
    return Kept


def _drop_other_part(base: nn.Module, part: ModelPart, *, keeps_projectors: bool) -> None:
    """With ``keeps_projectors`` a decoder loses its towers only, as its forward method may embed tokens by what else it has."""
    language_model = language_model_name(base)
    if filler_of(base) is not None:
        _drop_other_part_within(getattr(base, language_model), part)
        return
    for name, child in list(base.named_children()):
        if part is ModelPart.ENCODER and name != language_model:
            continue
        if part is ModelPart.DECODER and name in (language_model, *HEADS):
            continue
        if part is ModelPart.DECODER and keeps_projectors and not isinstance(child, PreTrainedModel):
            continue
        setattr(base, name, RemovedPart())
    if part is ModelPart.DECODER and not keeps_projectors:
        for name, _ in list(base.named_parameters(recurse=False)):
            base.register_parameter(name, None)  # None, not deleted: forward methods still read them
    marked: Any = base
    if part is ModelPart.DECODER:
        marked._is_hf_initialized = True  # noqa: SLF001 - or the loader would initialize removed parameters


def _drop_other_part_within(language_model: nn.Module, part: ModelPart) -> None:
    """The same for a language model that has the towers itself."""
    for name, _ in list(language_model.named_children()):
        if (name == _FILLER) is (part is ModelPart.DECODER):
            setattr(language_model, name, RemovedPart())
