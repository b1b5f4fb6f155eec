"""A model's own processor, applied to one item at a time, and what it writes into the prompt.

A processor replaces an item's target in the text, then tokenizes all. Its tokenizer here records that text, so that the
replacement is known exactly, with separators, whatever the release of transformers computes counts by.
"""

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoProcessor, AutoVideoProcessor, PretrainedConfig
from transformers.models.auto import processing_auto
from transformers.utils.import_utils import is_torchvision_available

from triptych.domain.embedding import TensorSpec
from triptych.domain.media import Modality
from triptych.engine.families.item_media import Video, blank_medium, noise
from triptych.engine.tensors import domain_dtype
from triptych.errors import InvalidMedia
from triptych.families.base import Placeholders, PromptReplacement
from triptych.families.generic import MOST_EXTRA_VALUES, BlankItem, ModelFacts, Processed
from triptych.families.model_files import BadModel, ModelFiles

logger = logging.getLogger(__name__)

_LOCAL = {"local_files_only": True, "trust_remote_code": False}
"""Nothing is fetched, and code in a model's directory is not run. Transformers would ask for the latter on the terminal."""
_ARGUMENTS = {Modality.IMAGE: "images", Modality.VIDEO: "videos", Modality.AUDIO: "audio"}
_BEFORE, _AFTER = "(before)", "(after)"
"""Text around an item's target."""
_WIDTH, _HEIGHT, _SAMPLES, _FRAMES, _DURATION_S = 200, 96, 16_000, 16, 4.0
"""Size of the item that is processed at start."""
_FRAMES_PER_S = 2.0
"""Frames that are sampled of a video where the settings of its processor do not say how many."""
_PIXEL_NBYTES, _VALUE_NBYTES, _CHANNELS = 3, 4, 3
_LARGE = 4
"""How much larger an item is that may be cut into parts."""
_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)$|^image_patch_id$|^visual_indicator_token_ids$")
"""Names of placeholders in configurations."""
_MASK, _MASK_DIMS = "_mask", 2
"""How names of masks end, and the dimensions of one that says how long parts of an item are."""
_NARROWED = {torch.int64: torch.int32}
"""Data types that extras are transferred in, where another one than their own."""
_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError, OSError)
"""What a processor may raise on an item of an odd size."""


@dataclass(frozen=True, slots=True)
class ItemInputs:
    """What a processor makes of a prompt with one item."""

    replacement: PromptReplacement
    tensors: Mapping[str, torch.Tensor]
    """With the processor's own dimensions, the batch's included; ``input_ids`` too."""
    frames: tuple[int, ...] = ()
    """Indices of the frames that it sampled of a video."""


class ItemProcessor:
    """``ItemProcessing`` by transformers, in this process. Thread-safe."""

    def __init__(self, files: ModelFiles) -> None:
        """Raises BadModel."""
        self._recorded = threading.local()
        try:
            self._config = AutoConfig.from_pretrained(files.directory, **_LOCAL)
            self._processor, self._videos = _load_processor(files)
        except (*_ERRORS, ImportError) as error:
            raise BadModel(
                f"transformers {transformers.__version__} has no processor for this model: {error}"
            ) from error
        if getattr(self._processor, "tokenizer", None) is None:
            raise BadModel(f"the processor of model_type {files.model_type!r} has no tokenizer")
        self._record_texts()
        if self._videos is not None:
            self._record_frames()
        self.lists: set[str] = set()
        """Names of outputs that the model takes as lists of numbers."""
        self._spelled = self._placeholder_strings()
        self._targets: dict[Modality, str] = {}
        self._numbered: set[Modality] = set()
        self._typed_in_context: set[str] = set()
        """Inputs by token that depend on the tokens around it, as where frames and images have one placeholder."""
        self.facts = self._facts(files)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The processor's settings, as JSON values."""
        settings: dict[str, Any] = self._processor.to_dict()
        return settings

    @property
    def sample_rate_hz(self) -> int:
        """Rate of audio; 0 for a processor that takes none."""
        parts = (getattr(self._processor, name, None) for name in ("feature_extractor", "audio_processor"))
        return next((int(rate) for part in parts if (rate := getattr(part, "sampling_rate", None))), 0)

    def close(self) -> None:
        """Do nothing: there is no process."""

    def processed(self, blank: BlankItem) -> Processed:
        made = self.process(blank.modality, blank_medium(blank), place=blank.place)
        specs = tuple(spec for spec, _ in extras(made.tensors))
        if blank.modality is not Modality.VIDEO:
            return Processed(made.replacement, specs)
        if not made.frames or list(made.frames) != sorted(made.frames):
            raise InvalidMedia("the model's processor samples no frames of the video, or not in their order")
        nbytes = _PIXEL_NBYTES * len(made.frames) * blank.width * blank.height
        nbytes += sum(_VALUE_NBYTES * tensor.numel() for tensor in made.tensors.values() if tensor.is_floating_point())
        return Processed(made.replacement, specs, made.frames, nbytes // (_VALUE_NBYTES * _CHANNELS))

    def process(self, modality: Modality, medium: Any, *, place: int = 0) -> ItemInputs:
        """Process an item (``item_media``; samples are at ``sample_rate_hz``) that ``place`` items of its modality precede.

        Raises InvalidMedia where the processor refuses it.
        """
        before = [blank_medium(self._probe(modality))] * (place if modality in self._numbered else 0)
        try:
            text, tensors = self._run(modality, self._targets[modality], [*before, medium])
        except _ERRORS as error:
            raise InvalidMedia(f"the model's processor refuses the {modality.value}: {error}") from error
        if before:
            _, tensors = self._run(modality, self._targets[modality], [medium])
        return ItemInputs(self._parts(_between(text)[-1]), tensors, self._recorded.frames)

    def probe(self, modality: Modality, times: int = 1) -> ItemInputs:
        """Process an item that is ``times`` larger than usual."""
        return self.process(modality, noise(self._probe(modality, times)))

    def token_types(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs [1, n] of the model's forward method by token, for ``ids`` [n]."""
        found: dict[str, torch.Tensor] = {}
        for name, types in self.facts.token_types.items():
            if name in self._typed_in_context:
                found[name] = torch.tensor(self._processor.create_mm_token_type_ids([ids.tolist()]))
                continue
            found[name] = torch.zeros_like(ids)[None]
            for token_id, kind in types.items():
                found[name][0, ids == token_id] = kind
        return found

    # --- what a model is -------------------------------------------------------------------------------------------

    def _facts(self, files: ModelFiles) -> ModelFacts:
        text = self._config.get_text_config()
        prefixes: set[str] = set()
        types: dict[str, dict[int, int]] = {}
        for modality in (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO):
            target = self._found_target(modality, files.chat_template) if self._takes(modality) else None
            if target is None:
                continue
            self._targets[modality] = target
            try:
                self._check_places(modality)
                if modality is Modality.VIDEO:
                    self._check_videos()
            except (BadModel, InvalidMedia, *_ERRORS) as error:
                if modality is not Modality.VIDEO:
                    raise
                logger.warning("the model's videos are not served: %s", error)
                del self._targets[modality]
                continue
            medium = blank_medium(self._probe(modality))
            written, _ = self._run(modality, target, [medium])
            around = self._templated(modality, files.chat_template) or _BEFORE + target + _AFTER
            self._typed_in_context |= _learn_types(types, self._made(modality, around, [medium]))
            prefixes.add(written.partition(_BEFORE)[0])
        if not self._targets:
            raise BadModel(
                f"the processor of model_type {files.model_type!r} writes no placeholders of items that its configuration names"
            )
        return ModelFacts(
            files.model_type,
            int(text.hidden_size),
            int(text.max_position_embeddings),
            {modality: self._ids(target) for modality, target in self._targets.items()},
            frozenset(self._spelled.values()),
            types,
            dict.fromkeys((Modality.IMAGE, Modality.VIDEO), len(layer_keys(self._config))),
            self.sample_rate_hz,
            frozenset(self._numbered),
            max(prefixes, key=len),
        )

    def _takes(self, modality: Modality) -> bool:
        if modality is Modality.AUDIO:
            return bool(self.sample_rate_hz)
        if modality is Modality.VIDEO:
            return self._videos is not None
        return getattr(self._processor, "image_processor", None) is not None

    def _placeholder_strings(self) -> dict[str, int]:
        """Tokens that the model fills with items, as its configuration names them, by their strings."""
        tokenizer = self._processor.tokenizer
        named = _placeholders(self._config)
        if not named:
            sections = (part for part in vars(self._config).values() if isinstance(part, PretrainedConfig))
            named = [value for section in sections for value in _placeholders(section)]
        ids = dict.fromkeys(token for value in named for token in (value if isinstance(value, list) else [value]))
        known = [token_id for token_id in ids if isinstance(token_id, int) and 0 <= token_id < len(tokenizer)]
        spelled = {tokenizer.convert_ids_to_tokens(token_id): token_id for token_id in known}
        return {token: token_id for token, token_id in spelled.items() if token}

    def _found_target(self, modality: Modality, template: str | None) -> str | None:
        """What the chat template writes for an item and the processor replaces by placeholders."""
        written = self._templated(modality, template)
        kind = modality.value
        attributes = (f"{kind}_token", "boi_token", "boa_token", f"{kind}_placeholder", f"fake_{kind}_token")
        candidates = [str(getattr(self._processor, name, None) or "") for name in attributes]
        candidates += [f"<{kind}>", f"<|{kind}|>", *self._spelled]
        if written is not None:
            candidates = [candidate for candidate in candidates if written.count(candidate) == 1]
            candidates.append(next(iter(_between(written)), "").strip())
        for candidate in dict.fromkeys(filter(None, candidates)):
            if "".join(self._processor.tokenizer.convert_ids_to_tokens(self._ids(candidate))) != candidate:
                continue  # not of special tokens only
            try:
                text, _ = self._run(modality, candidate, [blank_medium(self._probe(modality))])
            except _ERRORS:
                continue
            if any(isinstance(part, Placeholders) for part in self._parts(_between(text)[0])):
                return candidate
        return None

    def _templated(self, modality: Modality, template: str | None) -> str | None:
        """A chat with one item between texts, by the model's template; None without one that can be rendered so."""
        if template is None:
            return None
        texts = [{"type": "text", "text": text} for text in (_BEFORE, _AFTER)]
        content = [texts[0], {"type": modality.value}, texts[1]]
        try:
            rendered: str = self._processor.tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], chat_template=template, tokenize=False
            )
        except Exception:  # noqa: BLE001 - templates raise what they like
            return None
        return rendered

    def _check_places(self, modality: Modality) -> None:
        """Find out whether an item's replacement depends on its place. Raises BadModel if it depends on what is around it."""
        medium = blank_medium(self._probe(modality, _LARGE))
        target = self._targets[modality]
        try:
            (alone,) = _between(self._run(modality, target, [medium])[0])
            (spaced,) = _between(self._run(modality, f" {target} ", [medium])[0])
            first, second = _between(self._run(modality, target, [medium, medium])[0])
        except _ERRORS:
            return  # one that takes a single item
        if spaced != f" {alone} " or first != alone:
            raise BadModel(f"what the model's processor writes for an {modality.value} depends on what is around it")
        if second != first and modality is Modality.VIDEO:
            raise BadModel("what its processor writes for a video depends on the videos before it")
        if second != first:
            self._numbered.add(modality)

    def _check_videos(self) -> None:
        """Raise BadModel unless a video's shape says what it becomes, also when frames were sampled before."""
        modality = Modality.VIDEO
        blank = self._probe(modality)
        counted, medium = self.processed(blank), noise(blank)
        frames = Video(medium.frames[list(counted.frames)], blank, counted.frames)
        for made in (self.process(modality, medium), self.process(modality, frames)):
            specs = tuple(spec for spec, _ in extras(made.tensors))
            if (made.replacement, specs) != (counted.replacement, counted.extras):
                raise BadModel("what its processor writes for a video depends on more than its size")

    def _probe(self, modality: Modality, times: int = 1) -> BlankItem:
        """An item that is ``times`` larger than usual."""
        if modality is Modality.AUDIO:
            return BlankItem(modality, samples=times * _SAMPLES)
        size = BlankItem(modality, times * _WIDTH, times * _HEIGHT)
        return size if modality is Modality.IMAGE else replace(size, frames=_FRAMES, duration_s=_DURATION_S)

    # --- one run of the processor ------------------------------------------------------------------------------------

    def _run(self, modality: Modality, target: str, media: Sequence[Any]) -> tuple[str, dict[str, torch.Tensor]]:
        """The text that was tokenized for a prompt of targets, each between two texts, and the tensors that were made."""
        tensors = self._made(modality, "".join(_BEFORE + target + _AFTER for _ in media), media)
        text = next((text for text in reversed(self._recorded.texts) if len(_between(text)) == len(media)), None)
        if text is None:
            raise ValueError("it does not tokenize the prompt as text")
        return text, tensors

    def _made(self, modality: Modality, prompt: str, media: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The tensors of a prompt. The texts that are tokenized for it are recorded."""
        self._recorded.texts, self._recorded.frames = [], ()
        given: dict[str, Any] = {_ARGUMENTS[modality]: list(media)}
        if modality is Modality.AUDIO:
            given["sampling_rate"] = self.sample_rate_hz
        if modality is Modality.VIDEO:
            given = {
                "videos": [video.frames for video in media],
                "video_metadata": [video.metadata() for video in media],
            }
            given["do_sample_frames"] = all(video.indices is None for video in media)
            if all(getattr(self._videos, name, None) is None for name in ("fps", "num_frames")):
                given["fps"] = _FRAMES_PER_S
        made = self._processor(text=[prompt], return_tensors="pt", return_mm_token_type_ids=True, **given)
        tensors = {name: tensor for name, value in made.items() if (tensor := _tensor(value)) is not None}
        self.lists |= {name for name in tensors if isinstance(made[name], list | tuple)}
        return tensors

    def _record_texts(self) -> None:
        """Give the tokenizer a class of its own that records what it is called with, and is safe in several threads."""
        recorded, lock = self._recorded, threading.Lock()
        kind = type(self._processor.tokenizer)

        class Recording(kind):  # type: ignore[misc, valid-type]  # a class chosen at run time
            def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
                recorded.texts += [text] if isinstance(text, str) else list(text or ())
                with lock:
                    return super().__call__(text, *args, **kwargs)

        Recording.__name__, Recording.__qualname__ = kind.__name__, kind.__qualname__
        self._processor.tokenizer.__class__ = Recording

    def _record_frames(self) -> None:
        """Give the part for videos a class of its own that records which frames of the last video it samples."""
        recorded = self._recorded
        kind = type(self._videos)

        class Recording(kind):  # type: ignore[misc, valid-type]  # a class chosen at run time
            def sample_frames(self, *args: Any, **kwargs: Any) -> Any:
                sampled = super().sample_frames(*args, **kwargs)
                recorded.frames = tuple(map(int, sampled))
                return sampled

        Recording.__name__, Recording.__qualname__ = kind.__name__, kind.__qualname__
        self._videos.__class__ = Recording

    def _parts(self, text: str) -> PromptReplacement:
        """The replacement that a text is: runs of equal placeholders, and what is between them."""
        if not self._spelled:
            return (text,)
        pattern = "(" + "|".join(map(re.escape, sorted(self._spelled, key=len, reverse=True))) + ")"
        parts: list[str | Placeholders] = []
        for piece, same in groupby(piece for piece in re.split(pattern, text) if piece):
            count = len(list(same))
            parts.append(Placeholders(self._spelled[piece], count) if piece in self._spelled else piece * count)
        return tuple(parts)

    def _ids(self, text: str) -> tuple[int, ...]:
        self._recorded.texts = []
        ids: list[int] = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tuple(ids)


def _between(text: str) -> list[str]:
    """What stands between the texts around items."""
    return re.findall(f"{re.escape(_BEFORE)}(.*?){re.escape(_AFTER)}", text, re.DOTALL)


def extras(
    tensors: Mapping[str, torch.Tensor], *, most_integers: int | None = MOST_EXTRA_VALUES
) -> list[tuple[TensorSpec, torch.Tensor]]:
    """The small tensors of an item, from which the decoder computes positions, in the form that they are transferred in.

    ``most_integers``: values of one without floats; None for any number, as another item may have fewer.
    """
    found: list[tuple[TensorSpec, torch.Tensor]] = []
    of_text = tensors["input_ids"].shape
    for name, value in sorted(tensors.items()):
        if value.shape == of_text or not value.numel():
            continue
        tensor = _lengths(value) if name.endswith(_MASK) else value
        most = MOST_EXTRA_VALUES if tensor.is_floating_point() else most_integers
        if most is not None and tensor.numel() > most:
            continue
        sent = tensor.float() if tensor.is_floating_point() else tensor.to(_NARROWED.get(tensor.dtype, tensor.dtype))
        found.append((TensorSpec(name, domain_dtype(sent.dtype), tuple(sent.shape)), sent))
    return found


def _lengths(mask: torch.Tensor) -> torch.Tensor:
    """Lengths [n] in place of a mask [n, length] whose ones precede its zeros; another mask as it is."""
    if mask.dim() != _MASK_DIMS:
        return mask
    lengths = mask.bool().sum(1)
    return lengths if torch.equal(mask.bool(), _masks(lengths, mask.shape[1])) else mask


def _masks(lengths: torch.Tensor, longest: int) -> torch.Tensor:
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def mask_of(name: str, extra: torch.Tensor) -> torch.Tensor:
    """A mask as ``extras`` found it, where it sends lengths; another extra as it is."""
    return _masks(extra, int(extra.max())).long() if sends_lengths(name, extra) else extra


def exceeds(extra: torch.Tensor, most: int) -> bool:
    """Whether a row of an extra, such as a grid's sizes, has a larger product: as many positions would be computed."""
    sizes = extra.double().abs().reshape(-1, extra.shape[-1] if extra.dim() > 1 else 1)
    return bool((sizes.prod(-1) > most).any())


def sends_lengths(name: str, extra: torch.Tensor) -> bool:
    """Whether an extra is the lengths of a mask."""
    return name.endswith(_MASK) and extra.dim() == 1


def _learn_types(types: dict[str, dict[int, int]], tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Add what a processor's outputs beside the ids and the mask say of each token. Returns those that say several things of a token."""
    ids = tensors["input_ids"]
    in_context: set[str] = set()
    for name, tensor in tensors.items():
        if name not in ("input_ids", "attention_mask") and tensor.shape == ids.shape:
            known = types.setdefault(name, {})
            for token_id, kind in zip(ids[0].tolist(), tensor[0].tolist(), strict=True):
                if kind and known.setdefault(token_id, kind) != kind:
                    in_context.add(name)
    return in_context


def layer_keys(config: Any) -> tuple[int, ...]:
    """Layers of the decoder to which rows of items are added (DeepStack), in the order of the tensors."""
    if hasattr(config, "deepstack_layer_map"):
        return (*(layer for _, layer in config.deepstack_layer_map), *(config.spatial_target_layers or ()))
    vision = getattr(config, "vision_config", None)
    return tuple(range(len(getattr(vision, "deepstack_visual_indexes", None) or ())))


def _placeholders(config: Any) -> list[Any]:
    """Values of the settings of a configuration, or of a section, that name placeholders."""
    return [value for name, value in vars(config).items() if _PLACEHOLDER.search(name)]


def _tensor(value: Any) -> torch.Tensor | None:
    """A processor's output as a tensor; None for what has no numbers, or parts of different shapes."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return torch.from_numpy(array) if array.dtype.kind in "biuf" and array.size else None


def _load_processor(files: ModelFiles) -> tuple[Any, Any]:
    """Load the processor, with an image processor on Pillow where there is one, and its part for videos, if there is one here."""
    untyped: Any = processing_auto
    names = (
        files.processor.get("processor_class"),
        files.image_processor.get("processor_class"),
        files.tokenizer_config.get("processor_class"),
        untyped.PROCESSOR_MAPPING_NAMES.get(files.model_type),
    )
    name = next((name for name in names if isinstance(name, str)), None)
    kind: Any = getattr(transformers, name, None) if name else None
    if kind is None:
        loader: Any = AutoProcessor
        return loader.from_pretrained(files.directory, backend="pil", **_LOCAL), None
    if "video_processor" not in kind.get_attributes():
        return kind.from_pretrained(files.directory, backend="pil", **_LOCAL), None
    videos = _load_videos(files)
    return _with_videos(kind, videos or _NoVideos()).from_pretrained(files.directory, backend="pil", **_LOCAL), videos


def _load_videos(files: ModelFiles) -> Any:
    """Load a processor's part for videos; None without torchvision, or settings for one."""
    if not is_torchvision_available():
        return None
    loader: Any = AutoVideoProcessor
    try:
        return loader.from_pretrained(files.directory, **_LOCAL)
    except (*_ERRORS, ImportError) as error:
        logger.warning("the model's videos are not served: %s", error)
        return None


class _NoVideos(SimpleNamespace):
    """Stands in for a video processor."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _with_videos(kind: Any, videos: Any) -> Any:
    """A processor's class that has this part for videos, which is loaded apart: it is not on Pillow."""

    class WithVideos(kind):  # type: ignore[misc]  # a class chosen at run time
        _hides_videos = False
        video_processor: Any

        @classmethod
        def get_attributes(cls) -> list[str]:
            names: list[str] = super().get_attributes()
            return [name for name in names if not (cls._hides_videos and name == "video_processor")]

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
            cls._hides_videos = True
            loaded: list[Any] = super()._get_arguments_from_pretrained(*args, **kwargs)
            cls._hides_videos = False
            loaded.insert(cls.get_attributes().index("video_processor"), videos)
            return loaded

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is videos:
                return type(videos)
            return super().check_argument_for_proper_class(argument_name, argument)

        def to_dict(self) -> dict[str, Any]:
            if not isinstance(videos, _NoVideos):
                return dict(super().to_dict())
            self.video_processor = None
            try:
                return dict(super().to_dict())
            finally:
                self.video_processor = videos

    WithVideos.__name__ = WithVideos.__qualname__ = kind.__name__
    return WithVideos
