"""Harness for parity tests of families: tiny models, questions, and transformers' answers.

A family's ``tiny_<name>.py`` subclasses ``TinyFamily`` and names its instances in ``TINIES``; nothing else lists them.
"""

import importlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import transformers as untyped_transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.unit.engine.tiny import encoder_engine, text_engine
from triptych.domain.chat import MediaPart, Message, Part, TextPart
from triptych.domain.embedding import Tensor
from triptych.domain.engine import EmbeddingInput, EngineOutput, EngineRequest
from triptych.domain.media import MediaInfo, Modality, digest_of
from triptych.domain.sampling import SamplingParams
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.engine.encoder import TransformersEncoderEngine
from triptych.engine.families.item_processor import ItemProcessor
from triptych.families.base import as_in_request
from triptych.families.model_files import ModelFiles
from triptych.tokens.prompt import PromptBuilder

transformers: Any = untyped_transformers

MARGIN = 1e-3
"""How much likelier the best token has to be at every step of a reference, in logits."""
COMMON = ("<pad>", "<end>", "<user>", "<answer>")
"""The first special tokens of every tiny vocabulary; ids 0 to 3."""
EOS = COMMON.index("<end>")
_MERGES = (("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("Ġ", "a"), ("a", "b"), (":", "Ċ"))
"""Makes tokenization of an item's marks depend on the text around it, as in real vocabularies."""
_LETTERS = "abcdefgh .:\n"


# --- one family -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """An image, video or clip as a client sends it, and the router's metadata of it."""

    media: bytes
    info: MediaInfo

    @property
    def key(self) -> bytes:
        """Stands for the whole identity: there is one model and one processor here."""
        return self.info.digest + repr(self.info.options).encode()


class Unclear(AssertionError):
    """A reference of which rounding could change a token."""


Question = tuple[str | Item, ...]
"""The parts of one user message, in order."""


def items_of(question: Question) -> list[Item]:
    return [part for part in question if isinstance(part, Item)]


class TinyFamily(ABC):
    """A tiny random model of one family, and the reference results of transformers."""

    name: str
    """The configuration's ``model_type``; variants append a dash and their difference."""
    targets: Sequence[tuple[Modality, str]]
    """The chat template's text for an item of each modality."""
    seed: int = 0
    """Of the weights: another one where a reference is not clear."""
    chunk_tokens: int = 7
    """Token budget that splits items across steps; with bidirectional spans, the longest one."""
    context: int = 2048
    text: ClassVar[Mapping[str, Any]] = {}
    """Of the language model's configuration, beside what the family sets."""
    generation: ClassVar[Mapping[str, Any]] = {}
    """Of ``generation_config.json``, beside what all have."""
    items: int | None = None
    """Items of every request, where the model takes no other number."""
    prompt_name: ClassVar[str] = "input_ids"
    """Argument of ``generate`` that has the prompt's tokens."""

    @property
    def model_type(self) -> str:
        return self.name.partition("-")[0]

    @abstractmethod
    def processor(self) -> Any:
        """The processor of transformers, with ``self.template`` as its chat template."""

    @abstractmethod
    def model(self) -> Any:
        """The whole model with random weights, large enough that answers vary."""

    def make(self, directory: Path) -> None:
        """Saves all files of a published model directory."""
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.manual_seed(self.seed)
        model = self.model()
        usual = {"eos_token_id": EOS, "pad_token_id": 0, "do_sample": False}
        model.generation_config = transformers.GenerationConfig(**usual, **self.generation)
        model.save_pretrained(directory)
        self.processor().save_pretrained(directory)

    def load_processor(self, directory: Path) -> Any:
        return transformers.AutoProcessor.from_pretrained(directory)

    def item(self, rng: random.Random, modality: Modality) -> Item:
        """A random item; sizes and shapes vary."""
        assert modality is Modality.IMAGE
        return random_image(rng, rng.randrange(8, 90), rng.randrange(8, 90))

    def text_before(self, rng: random.Random) -> str:
        """Text that a question begins with."""
        return random_text(rng)

    def text_after(self, rng: random.Random) -> str:
        """Text that follows an item."""
        return random_text(rng)

    def other_ending(self, text: str) -> str:
        """Another last text for the same question."""
        return text + " cb"

    def prompt(self, processor: Any, content: list[dict[str, str]]) -> str:
        """The text of a prompt with one user message, without transformers' treatment of items."""
        rendered: str = processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return rendered

    def inputs(self, processor: Any, text: str, items: Sequence[Item]) -> Any:
        """The processor's output for a templated prompt: the input of ``generate``."""
        images = [pixels_of(item) for item in items if item.info.modality is Modality.IMAGE]
        return processor(text=text, images=images or None, return_tensors="pt")

    def adjust(self, whole: Any) -> None:  # noqa: B027 - most need nothing
        """Makes the reference answer as the family is served, where transformers itself answers otherwise."""

    @property
    def template(self) -> str:
        """A chat template that writes each item's target in its place."""
        branches = "".join(
            f"{{%- elif part['type'] == '{modality.value}' -%}}{{{{ {target!r} }}}}"
            for modality, target in self.targets
        )
        return (
            "{%- for message in messages -%}{{ '<' + message['role'] + '>' }}{%- for part in message['content'] -%}"
            "{%- if part['type'] == 'text' -%}{{ part['text'] }}"
            + branches
            + "{%- endif -%}{%- endfor -%}{%- endfor -%}"
            "{{ '<answer>' }}"
        )


def tokenizer(*special: str, named: Mapping[str, str] | None = None) -> Any:
    """Bytes and a few pairs of bytes, with ``COMMON``, ``special`` and ``named`` tokens from id 0 on.

    A processor finds ``named`` ones as attributes (``image_token``); without them it uses their usual spelling.
    """
    added = list(dict.fromkeys((*COMMON, *special, *(named or {}).values())))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*added, *alphabet, *(left + right for left, right in _MERGES)]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=list(_MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(added)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=COMMON[0],
        eos_token=COMMON[1],
        extra_special_tokens=named or [token for token in added if token not in COMMON[:2]],
    )


def llama_sizes(vocabulary: int, **changes: Any) -> dict[str, Any]:
    """A small decoder in the terms shared by most of transformers' text configurations."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": TinyFamily.context,
        "initializer_range": 0.25,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": EOS,
    } | changes


def image_processor_class(name: str) -> Any:
    """The class from its module, since transformers 5.17 exports placeholders for some that mention torchvision."""
    return getattr(importlib.import_module(getattr(transformers, name).__module__), name)


def without_video(cls: Any) -> Any:
    """A processor class without its video processor, which needs torchvision."""

    class ImagesOnly(cls):  # type: ignore[misc]  # a class that is chosen at run time
        video_processor = SimpleNamespace(num_frames=0, fps=0)  # read by templates, without effect

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != "video_processor"]

    ImagesOnly.__name__ = cls.__name__
    return ImagesOnly


def siglip_sizes(**changes: Any) -> dict[str, Any]:
    """A small encoder in the terms shared by most of transformers' vision configurations."""
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.5,
    } | changes


def random_image(rng: random.Random, width: int, height: int) -> Item:
    """Coarse noise, which survives resizing."""
    coarse = Image.frombytes("RGB", (6, 6), rng.randbytes(3 * 6 * 6))
    out = BytesIO()
    coarse.resize((width, height), Image.Resampling.NEAREST).save(out, "PNG")
    media = out.getvalue()
    digest = digest_of(media)
    return Item(media, MediaInfo(Modality.IMAGE, "png", width, height, len(media), digest))


def pixels_of(item: Item) -> Image.Image:
    return Image.open(BytesIO(item.media)).convert("RGB")


def all_tiny_families() -> dict[str, TinyFamily]:
    """By name, of all modules ``tiny_*.py`` beside this one."""
    stems = sorted(path.stem for path in Path(__file__).parent.glob("tiny_*.py"))
    package = __name__.rpartition(".")[0]
    found = [importlib.import_module(f"{package}.{stem}") for stem in stems]
    tinies: list[TinyFamily] = [tiny for module in found for tiny in module.TINIES]
    return {tiny.name: tiny for tiny in tinies}


# --- encoder and decoder in two processes -----------------------------------------------------------------------------

Encoded = tuple[int, tuple[tuple[Any, bytes], ...]]
"""An item's token count, and the spec and bytes of each of its tensors."""
Encode = Callable[[Path, Sequence[Item]], list[Encoded]]


@contextmanager
def encoder_process(device: str = "cpu") -> Iterator[Encode]:
    """Encoders run in one other process; the decoders' process never loads an encoder."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        yield lambda directory, items: pool.submit(_encode, str(directory), list(items), device).result()


_engines: dict[tuple[str, str], TransformersEncoderEngine] = {}


def encode_here(directory: Path, items: Sequence[Item], dtype: str = "float32") -> list[Encoded]:
    """``Encode`` in this process."""
    return _encode(str(directory), list(items), dtype=dtype)


def _encode(directory: str, items: list[Item], device: str = "cpu", dtype: str = "float32") -> list[Encoded]:
    """In the encoder process: all items in one batch."""
    if (directory, dtype) not in _engines:
        _engines.clear()  # one family after the other
        _engines[directory, dtype] = encoder_engine(Path(directory), device=device, dtype=dtype)
    engine = _engines[directory, dtype]
    prepared = [engine.prepare(item.media, item.info) for item in items]
    return [
        (item.tokens, tuple((tensor.spec, bytes(tensor.data)) for tensor in tensors))
        for item, tensors in zip(prepared, engine.encode(prepared), strict=True)
    ]


# --- one family under test -------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One tiny model: its router side, its two engines, and the reference. Its directory is read-only."""

    tiny: TinyFamily
    directory: Path
    encode: Encode
    device: str = "cpu"
    """Of the text engines. The reference is computed on the CPU."""
    margin: float = MARGIN
    dtype: str = "float32"
    """Of text engines and the reference. ``encode`` has to use the same."""
    _answers: dict[tuple[Question, int], list[int]] = field(default_factory=dict)

    @cached_property
    def builder(self) -> PromptBuilder:
        return PromptBuilder.load(ModelFiles.load(self.directory), process=ItemProcessor)

    @cached_property
    def _whole(self) -> Any:
        config = transformers.AutoConfig.from_pretrained(self.directory)
        cls = getattr(transformers, config.architectures[0])
        whole = cls.from_pretrained(self.directory, dtype=getattr(torch, self.dtype)).eval()
        self.tiny.adjust(whole)
        return whole

    @cached_property
    def _processor(self) -> Any:
        return self.tiny.load_processor(self.directory)

    @cached_property
    def slot_nbytes(self) -> int:
        """KV bytes of one token."""
        return (1 << 22) // self.engine(kv_cache_bytes=1 << 22).kv_tokens

    def engine(self, **changes: Any) -> TransformersTextEngine:
        usual = {"kv_cache_bytes": 32 << 20, "token_budget": 512, "device": self.device, "dtype": self.dtype}
        return text_engine(self.directory, **(usual | changes))

    def question(self, seed: int, items: int) -> Question:
        """Texts around ``items`` items of random modalities and sizes."""
        rng = random.Random(seed)
        parts: list[str | Item] = [self.tiny.text_before(rng)]
        for _ in range(items if self.tiny.items is None else self.tiny.items):
            parts += [self.tiny.item(rng, rng.choice(self.tiny.targets)[0]), self.tiny.text_after(rng)]
        return tuple(parts)

    def question_of(self, seed: int, *modalities: Modality) -> Question:
        """Texts around one item of each of these."""
        rng = random.Random(seed)
        parts: list[str | Item] = [self.tiny.text_before(rng)]
        for modality in modalities[: self.tiny.items]:
            parts += [self.tiny.item(rng, modality), self.tiny.text_after(rng)]
        return tuple(parts)

    def with_other_ending(self, question: Question) -> Question:
        """The same prefix, items included, with another last text."""
        *beginning, last = question
        assert isinstance(last, str)
        return (*beginning, self.tiny.other_ending(last))

    def request(self, name: str, question: Question, max_tokens: int) -> EngineRequest:
        """A request as router and encoder build it; its prompt must equal the processor's."""
        found = items_of(question)
        infos = as_in_request(self.builder.family, [item.info for item in found])
        items = [replace(item, info=info) for item, info in zip(found, infos, strict=True)]
        prompt = self.builder.build([message_of(question)], infos)
        assert list(prompt.token_ids) == self._inputs(question)[self.tiny.prompt_name][0].tolist()
        embeddings: list[EmbeddingInput] = []
        for item, run, (tokens, tensors) in zip(items, prompt.runs, self.encode(self.directory, items), strict=True):
            assert tokens == run.tokens
            made = {spec.name: Tensor(spec, memoryview(data)) for spec, data in tensors}
            embeddings.append(EmbeddingInput(run.start, run.tokens, made, item.key))
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, seed=0)
        return EngineRequest(name, prompt.token_ids, tuple(embeddings), sampling)

    def answer(self, question: Question, max_tokens: int) -> list[int]:
        """Greedy answer of the whole model; asserts that every argmax is clear, so that rounding cannot change it."""
        known = self._answers.get((question, max_tokens))
        if known is None:
            known = self._answers[question, max_tokens] = self._generate(question, max_tokens)
        return known

    def _inputs(self, question: Question) -> Any:
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": part.info.modality.value}
            for part in question
        ]
        return self.tiny.inputs(self._processor, self.tiny.prompt(self._processor, content), items_of(question))

    def _generate(self, question: Question, max_tokens: int) -> list[int]:
        inputs = self._inputs(question)
        out = self._whole.generate(
            **inputs, max_new_tokens=max_tokens, do_sample=False, output_scores=True, return_dict_in_generate=True
        )
        best = torch.stack(out.scores)[:, 0].topk(2).values
        margin = float((best[:, 0] - best[:, 1]).min())
        if margin <= self.margin:
            raise Unclear(f"choose another seed: the reference is not clear ({margin:.1e})")
        tokens: list[int] = out.sequences[0, inputs[self.tiny.prompt_name].shape[1] :].tolist()
        return tokens


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randrange(3, 16))) + "!"


def message_of(question: Question) -> Message:
    """The chat message that a client sends."""
    parts: list[Part] = [
        TextPart(part) if isinstance(part, str) else MediaPart(part.info.modality, part.media) for part in question
    ]
    return Message("user", tuple(parts))


def renamed(request: EngineRequest, name: str) -> EngineRequest:
    return replace(request, request_id=name)


def finish(engine: TransformersTextEngine, outputs: Sequence[EngineOutput] = ()) -> dict[str, list[int]]:
    """Steps until no work is left; returns the tokens of each request, those of ``outputs`` first.

    Raises the first error.
    """
    answers: dict[str, list[int]] = {}
    collected = list(outputs)
    while engine.has_work:
        collected += engine.step()
    for output in collected:
        if output.error is not None:
            raise output.error
        answers.setdefault(output.request_id, []).extend(output.token_ids)
    return answers
