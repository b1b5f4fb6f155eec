"""A tiny LLaVA with random weights, and transformers' results for it: the reference of the engine tests."""

import random
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import transformers as untyped_transformers
from PIL import Image, ImageOps
from tokenizers import Tokenizer, models, pre_tokenizers

from triptych.domain.engine import EmbeddingInput, EngineOutput, EngineRequest
from triptych.domain.media import MediaInfo, Modality, digest_of
from triptych.domain.sampling import SamplingParams
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.engine.encoder import TransformersEncoderEngine

transformers: Any = untyped_transformers

TOKENS_PER_IMAGE = 16
MARGIN = 1e-3
_WORDS = 120
SPECIAL = ("<pad>", "<end>", "<image>", "<unk>")
EOS = 1


def text_config(kind: Any = transformers.LlamaConfig, **changes: Any) -> Any:
    """A small language model for ``make_model``."""
    options: dict[str, Any] = {
        "vocab_size": len(SPECIAL) + _WORDS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": EOS,
    }
    return kind(**(options | changes))


def make_model(directory: Path, *, seed: int = 0, eos: int | list[int] = EOS, text: Any = None) -> Path:
    """Saves a model with weights large enough that its answers vary and its argmax is clear.

    ``text`` is the configuration of a language model other than a Llama with full attention.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    words = [*SPECIAL, *(f"w{index}" for index in range(_WORDS))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=SPECIAL[3]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        extra_special_tokens=[SPECIAL[2]],
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        unk_token=SPECIAL[3],
    )
    images = transformers.CLIPImageProcessorPil(
        size={"height": 32, "width": 32}, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    processor = transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=SPECIAL[2],
    )
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=32,
            patch_size=8,
            initializer_range=0.5,
            initializer_factor=4.0,
        ),
        text_config=text or text_config(),
        image_token_id=2,
        vision_feature_layer=-2,
        image_seq_length=TOKENS_PER_IMAGE,
        tie_word_embeddings=False,
        initializer_range=0.25,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(eos_token_id=eos, pad_token_id=0, do_sample=False)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def random_image(rng: random.Random, width: int, height: int) -> bytes:
    pixels = Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))
    return png(pixels)


def png(image: Image.Image, **options: Any) -> bytes:
    out = BytesIO()
    image.save(out, "PNG", **options)
    return out.getvalue()


def info_of(media: bytes, fmt: str = "png") -> MediaInfo:
    """The metadata that the router would read from the header."""
    with Image.open(BytesIO(media)) as image:
        width, height = ImageOps.exif_transpose(image).size
    digest = digest_of(media)
    return MediaInfo(Modality.IMAGE, fmt, width, height, len(media), digest)


@dataclass(frozen=True)
class Question:
    text: str
    images: tuple[bytes, ...] = ()


def random_question(rng: random.Random, images: int) -> Question:
    """Words with ``images`` placeholders among them."""
    words = [f"w{rng.randrange(_WORDS)}" for _ in range(rng.randrange(2, 12))]
    for _ in range(images):
        words.insert(rng.randrange(len(words)), "<image>")
    sizes = [(rng.randrange(8, 60), rng.randrange(8, 60)) for _ in range(images)]
    return Question(" ".join(words), tuple(random_image(rng, *size) for size in sizes))


class Reference:
    """The whole model under ``generate``, with the checkpoint's own processor."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = transformers.LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
        self.model.eval()
        self.placeholder_id: int = self.model.config.image_token_id
        self.processor: Any = transformers.AutoProcessor.from_pretrained(directory)

    def inputs(self, question: Question) -> Any:
        images = [ImageOps.exif_transpose(Image.open(BytesIO(media))) for media in question.images]
        return self.processor(text=question.text, images=images or None, return_tensors="pt")

    def prompt(self, question: Question) -> tuple[int, ...]:
        return tuple(self.inputs(question)["input_ids"][0].tolist())

    def answer(self, question: Question, max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """Greedy; asserts that every argmax is clear, so that rounding cannot change it."""
        inputs = self.inputs(question)
        options: dict[str, Any] = {"eos_token_id": None} if ignore_eos else {}
        out = self.model.generate(
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        best = torch.stack(out.logits)[:, 0].topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > MARGIN, "choose another seed: the argmax is not clear"
        tokens: list[int] = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens


def text_engine(directory: Path | Checkpoint, **changes: Any) -> TransformersTextEngine:
    options: dict[str, Any] = {"kv_cache_bytes": 4 << 20, "max_sequences": 16, "token_budget": 64}
    options |= {field.name: changes.pop(field.name) for field in fields(EngineOptions) if field.name in changes}
    rest: dict[str, Any] = {"max_embedding_bytes": 1 << 30, "compute": _compute(changes)}
    return TransformersTextEngine(directory, EngineOptions(**options), model_id="tiny", **(rest | changes))


def encoder_engine(directory: Path | Checkpoint, **changes: Any) -> TransformersEncoderEngine:
    options: dict[str, Any] = {"model_id": "tiny", "compute": _compute(changes)}
    return TransformersEncoderEngine(directory, **(options | changes))


def _compute(changes: dict[str, Any]) -> ComputeOptions:
    return ComputeOptions(
        **{field.name: changes.pop(field.name) for field in fields(ComputeOptions) if field.name in changes}
    )


def engine_request(
    name: str,
    question: Question,
    reference: Reference,
    encoder: TransformersEncoderEngine,
    sampling: SamplingParams,
    *,
    lora: str = "",
) -> EngineRequest:
    """The prompt as transformers tokenizes it, and the embeddings as the encoder engine makes them, with the adapter ``lora``."""
    prompt = reference.prompt(question)
    places = [at for at, token in enumerate(prompt) if token == reference.placeholder_id]
    infos = [info_of(media).with_lora(lora) if lora else info_of(media) for media in question.images]
    prepared = [encoder.prepare(media, info) for media, info in zip(question.images, infos, strict=True)]
    encoded = encoder.encode(prepared)
    embeddings = tuple(
        EmbeddingInput(start, item.tokens, {tensor.spec.name: tensor for tensor in tensors}, info_of(media).digest)
        for start, item, tensors, media in zip(
            places[::TOKENS_PER_IMAGE], prepared, encoded, question.images, strict=True
        )
    )
    return EngineRequest(name, prompt, embeddings, sampling)


def greedy(max_tokens: int, *, ignore_eos: bool = False) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos, seed=0)


def run(engine: TransformersTextEngine, outputs: list[EngineOutput] | None = None) -> dict[str, list[int]]:
    """Steps until no work is left; returns the tokens of each request. Raises the first error."""
    answers: dict[str, list[int]] = {}
    collected = list(outputs or [])
    while engine.has_work:
        collected += engine.step()
    for output in collected:
        if output.error is not None:
            raise output.error
        answers.setdefault(output.request_id, []).extend(output.token_ids)
    return answers


def parameter_nbytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and of buffers that are saved with them; tied ones count once."""
    names = {name for name, _ in model.named_parameters()}
    saved = [*model.parameters(), *(buffer for name, buffer in model.state_dict().items() if name not in names)]
    return sum(nbytes for nbytes in {tensor.data_ptr(): tensor.nbytes for tensor in saved}.values())
