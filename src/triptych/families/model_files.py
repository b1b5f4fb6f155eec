"""The configuration files of a model directory, parsed once for tokens and families."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from triptych.files import BadFile, read_json, read_text

Json = Mapping[str, Any]
MAX_CONFIG_BYTES = 16 * 1024 * 1024
DEFAULT_TEMPLATE, TOOLS_TEMPLATE = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"


class BadModel(ValueError):
    """A model directory that cannot be served. Raised only at startup."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The parsed configuration files of a model directory; a missing file is an empty mapping.

    ``image_processor`` is the section of ``processor_config.json``, or else ``preprocessor_config.json``, in
    transformers' order. ``video_processor`` is its section, or ``video_preprocessor_config.json``, or else like for
    images. ``chat_template`` is the template's source, or None. ``tools_template`` is that for requests with tools, where
    a model has several.
    """

    directory: Path
    config: Json
    processor: Json
    image_processor: Json
    tokenizer_config: Json
    generation_config: Json
    chat_template: str | None
    video_processor: Json = field(default_factory=dict)
    tools_template: str | None = None

    @classmethod
    def load(cls, directory: Path | str) -> Self:
        """Read and parse the files. Raises BadModel, naming the file, if one is required or cannot be parsed."""
        root = Path(directory)
        if not root.is_dir():
            raise BadModel(f"model directory {root.name!r} does not exist")
        config = _read_json(root / "config.json")
        if not config:
            fault = "has an empty" if (root / "config.json").is_file() else "has no"
            raise BadModel(f"model directory {root.name!r} {fault} config.json")
        processor = _read_json(root / "processor_config.json")
        tokenizer_config = _read_json(root / "tokenizer_config.json")
        preprocessor = _read_json(root / "preprocessor_config.json")
        videos = _read_json(root / "video_preprocessor_config.json") or preprocessor
        templates = _chat_templates(root, processor, tokenizer_config)
        return cls(
            directory=root,
            config=config,
            processor=processor,
            image_processor=processor.get("image_processor") or preprocessor,
            video_processor=processor.get("video_processor") or videos,
            tokenizer_config=tokenizer_config | _missing_special_tokens(root, tokenizer_config),
            generation_config=_read_json(root / "generation_config.json"),
            chat_template=templates.get("default"),
            tools_template=templates.get("tool_use"),
        )

    @classmethod
    def of_config(cls, path: Path) -> Self:
        """Only ``config.json``, whatever is beside it. Raises BadModel."""
        config = _read_json(path)
        if not config:
            raise BadModel(f"{path.name} is empty or does not exist")
        return cls(path.parent, config, {}, {}, {}, {}, None)

    @property
    def model_type(self) -> str:
        """The architecture's name in transformers (``llava``)."""
        return str(self.config.get("model_type", ""))

    @property
    def feature_extractor(self) -> Json:
        """The audio feature extractor: in ``processor_config.json``, or else ``preprocessor_config.json``."""
        nested = self.processor.get("feature_extractor") or self.processor.get("audio_processor")
        return nested or self.image_processor

    @property
    def tokenizer_file(self) -> Path:
        """The serialized tokenizer, which may be missing."""
        return self.directory / "tokenizer.json"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = read_json(path, MAX_CONFIG_BYTES)
    except BadFile as error:
        raise BadModel(f"{path.name} {error}") from None
    if not isinstance(value, dict):
        raise BadModel(f"{path.name} is not a JSON object")
    return value


def _read_text(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        return read_text(path, MAX_CONFIG_BYTES)
    except BadFile as error:
        raise BadModel(f"{path.name} {error}") from None


def _chat_templates(root: Path, processor: Json, tokenizer_config: Json) -> Mapping[str, str]:
    """The named templates. Raises BadModel.

    In transformers' order: processor_config.json, chat_template.json, chat_template.jinja with
    additional_chat_templates/, tokenizer_config.json.
    """
    candidates = (
        processor.get("chat_template"),
        _read_json(root / "chat_template.json").get("chat_template"),
        _jinja_files(root),
        tokenizer_config.get("chat_template"),
    )
    templates = next((candidate for candidate in candidates if candidate), {})
    if isinstance(templates, str):
        templates = {"default": templates}
    if isinstance(templates, list):  # [{"name": ..., "template": ...}]
        templates = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)} or None
    if not isinstance(templates, dict) or not all(isinstance(template, str) for template in templates.values()):
        raise BadModel("the chat template is not a string")
    if templates and "default" not in templates:
        raise BadModel("none of the model's chat templates is named 'default'")
    return templates


def _jinja_files(root: Path) -> dict[str, str]:
    names = {"default": DEFAULT_TEMPLATE, "tool_use": TOOLS_TEMPLATE}
    texts = {name: _read_text(root / file) for name, file in names.items()}
    return {name: text for name, text in texts.items() if text}


def _missing_special_tokens(root: Path, tokenizer_config: Json) -> dict[str, Any]:
    """Special tokens that older models name only in ``special_tokens_map.json``."""
    special = _read_json(root / "special_tokens_map.json")
    return {name: token for name, token in special.items() if name not in tokenizer_config}
