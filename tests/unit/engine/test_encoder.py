import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from tests.unit.engine.tiny import TOKENS_PER_IMAGE, Reference, encoder_engine, info_of, png, random_image
from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.media import Modality
from triptych.engine.encoder import PreparedMedia, TransformersEncoderEngine
from triptych.engine.media.image_processor import ImagePreparer
from triptych.engine.tensors import from_bytes
from triptych.errors import EngineFailure, InvalidMedia
from triptych.families.model_files import BadModel

CPU = torch.device("cpu")


def photo(width: int = 40, height: int = 24, seed: int = 0) -> Image.Image:
    return Image.open(BytesIO(random_image(random.Random(seed), width, height)))


def saved(image: Image.Image, fmt: str, **options: object) -> bytes:
    out = BytesIO()
    image.save(out, fmt, **options)
    return out.getvalue()


def embed(encoder: TransformersEncoderEngine, media: bytes, fmt: str = "png") -> torch.Tensor:
    ((tensor,),) = encoder.encode([encoder.prepare(media, info_of(media, fmt))])
    return from_bytes(tensor, CPU)


def reference_embeds(reference: Reference, media: bytes) -> torch.Tensor:
    image: Image.Image = ImageOps.exif_transpose(Image.open(BytesIO(media)))
    if image.has_transparency_data:  # as transformers does since 5.23
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    pixels = reference.processor.image_processor(images=[image], return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        embeds: torch.Tensor = reference.model.get_image_features(pixels, return_dict=True).pooler_output[0]
    return embeds


def transparent_palette() -> bytes:
    return png(photo().quantize(16), transparency=3)


IMAGES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "rgb": ("png", lambda: png(photo())),
    "1x1": ("png", lambda: png(photo(1, 1))),
    "one row": ("png", lambda: png(photo(50, 1))),
    "three columns": ("png", lambda: png(photo(3, 50))),
    "three rows": ("png", lambda: png(photo(50, 3))),
    "grey": ("png", lambda: png(photo().convert("L"))),
    "grey and alpha": ("png", lambda: png(photo().convert("LA"))),
    "alpha": ("png", lambda: png(Image.merge("RGBA", [*photo().split(), photo(seed=1).convert("L")]))),
    "palette": ("png", lambda: png(photo().quantize(16))),
    "palette with alpha": ("png", transparent_palette),
    "bilevel": ("png", lambda: png(photo().convert("1"))),
    "jpeg": ("jpeg", lambda: saved(photo(), "JPEG")),
    "cmyk": ("jpeg", lambda: saved(photo().convert("CMYK"), "JPEG")),
    "webp": ("webp", lambda: saved(photo(), "WEBP")),
    "gif": ("gif", lambda: saved(photo(), "GIF", save_all=True, append_images=[photo(seed=1)])),
    "bmp": ("bmp", lambda: saved(photo(), "BMP")),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_every_kind_of_image_is_embedded_as_transformers_does(
    encoder: TransformersEncoderEngine, reference: Reference, kind: str
) -> None:
    fmt, make = IMAGES[kind]
    media = make()
    assert torch.allclose(embed(encoder, media, fmt), reference_embeds(reference, media), atol=1e-4)


def test_a_16_bit_grey_image_has_the_embedding_of_its_8_bit_version(encoder: TransformersEncoderEngine) -> None:
    """Pillow, and transformers' processors with it, would saturate nearly all of its values."""
    grey = photo().convert("L")
    values = np.asarray(grey).astype(np.uint16) * 257
    assert torch.equal(embed(encoder, png(Image.fromarray(values))), embed(encoder, png(grey)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_applied(
    encoder: TransformersEncoderEngine, reference: Reference, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    media = saved(photo(40, 24), "JPEG", exif=exif)
    info = info_of(media, "jpeg")
    assert (info.width, info.height) == ((40, 24) if orientation < 5 else (24, 40))
    assert torch.allclose(embed(encoder, media, "jpeg"), reference_embeds(reference, media), atol=1e-4)
    if orientation >= 5:
        with pytest.raises(InvalidMedia, match="24x40"):
            encoder.prepare(media, replace(info, width=40, height=24))


def test_a_batch_of_different_images_equals_each_alone(encoder: TransformersEncoderEngine) -> None:
    media = [random_image(random.Random(seed), 8 + 9 * seed, 60 - 7 * seed) for seed in range(7)]
    prepared = [encoder.prepare(item, info_of(item)) for item in media]
    together = encoder.encode(prepared)
    for item, (tensor,) in zip(media, together, strict=True):
        assert torch.allclose(from_bytes(tensor, CPU), embed(encoder, item), atol=1e-4)


def test_outputs_match_their_announced_specs(encoder: TransformersEncoderEngine) -> None:
    media = png(photo())
    prepared = encoder.prepare(media, info_of(media))
    assert prepared.tokens == TOKENS_PER_IMAGE
    assert prepared.outputs == (TensorSpec("embeds", DType.F32, (TOKENS_PER_IMAGE, 64)),)
    assert prepared.nbytes == 3 * 32 * 32 * 4
    ((tensor,),) = encoder.encode([prepared])
    assert tensor.spec == prepared.outputs[0]
    assert tensor.data.readonly
    assert encoder.encode([]) == []


def test_bfloat16_embeddings_stay_bfloat16(model_dir: Path, encoder: TransformersEncoderEngine) -> None:
    media = png(photo())
    half = encoder_engine(model_dir, dtype="bfloat16")
    ((tensor,),) = half.encode([half.prepare(media, info_of(media))])
    assert tensor.spec == TensorSpec("embeds", DType.BF16, (TOKENS_PER_IMAGE, 64))
    assert from_bytes(tensor, CPU).isfinite().all()
    assert half.model.dtype is DType.BF16


def test_images_are_preprocessed_by_several_threads_at_once(encoder: TransformersEncoderEngine) -> None:
    media = [random_image(random.Random(seed), 30 + seed, 50 - seed) for seed in range(24)]
    with ThreadPoolExecutor(8) as pool:
        prepared = list(pool.map(lambda item: encoder.prepare(item, info_of(item)), media))
    for item, ready in zip(media, prepared, strict=True):
        alone = encoder.prepare(item, info_of(item))
        assert torch.equal(ready.features["pixel_values"], alone.features["pixel_values"])


def damaged_images() -> dict[str, tuple[bytes, str]]:
    whole, jpeg = png(photo(60, 60)), saved(photo(60, 60), "JPEG")
    return {
        "truncated png": (whole[: len(whole) // 2], "png"),
        "truncated jpeg": (jpeg[: len(jpeg) // 2], "jpeg"),
        "header alone": (whole[:40], "png"),
        "empty": (b"", "png"),
        "noise": (random.Random(0).randbytes(500), "png"),
        "another format than it says": (jpeg, "png"),
        "a format that is not allowed": (saved(photo(60, 60), "TIFF"), "tiff"),
    }


@pytest.mark.parametrize("kind", damaged_images())
def test_the_error_for_a_damaged_image_has_no_details(encoder: TransformersEncoderEngine, kind: str) -> None:
    media, fmt = damaged_images()[kind]
    info = replace(info_of(png(photo(60, 60))), format=fmt)
    with pytest.raises(InvalidMedia) as caught:
        encoder.prepare(media, info)
    assert str(caught.value) in {
        f"the {fmt} image cannot be decoded",
        f"the {fmt} image is cut off",
        f"image of format {fmt!r} is not supported",
    }


def test_an_image_of_another_size_than_its_header_is_refused(encoder: TransformersEncoderEngine) -> None:
    media = png(photo(60, 40))
    for width, height in ((40, 60), (60, 41), (1, 1)):
        with pytest.raises(InvalidMedia, match="60x40"):
            encoder.prepare(media, replace(info_of(media), width=width, height=height))


def test_a_differing_size_is_found_before_decoding(encoder: TransformersEncoderEngine) -> None:
    bomb = png(Image.new("1", (16000, 16000)))
    small = info_of(png(photo(4, 4)))
    with pytest.raises(InvalidMedia):
        encoder.prepare(bomb, small)


def test_other_modalities_are_refused(encoder: TransformersEncoderEngine) -> None:
    media = png(photo())
    with pytest.raises(InvalidMedia, match="audio"):
        encoder.prepare(media, replace(info_of(media), modality=Modality.AUDIO))


def test_a_non_finite_embedding_is_an_error(encoder: TransformersEncoderEngine) -> None:
    media = png(photo())
    good = encoder.prepare(media, info_of(media))
    bad = PreparedMedia({"pixel_values": torch.full((1, 3, 32, 32), float("nan"))}, good.tokens, good.outputs)
    with pytest.raises(EngineFailure, match="not finite"):
        encoder.encode([good, bad])
    assert len(encoder.encode([good])) == 1


def test_a_failing_forward_pass_is_an_engine_failure(encoder: TransformersEncoderEngine) -> None:
    media = png(photo())
    good = encoder.prepare(media, info_of(media))
    bad = PreparedMedia({"pixel_values": torch.zeros(1, 3, 31, 32)}, good.tokens, good.outputs)
    with pytest.raises(EngineFailure) as caught:
        encoder.encode([good, bad])
    assert "31" not in str(caught.value)


def test_the_identity_has_software_and_processor(
    model_dir: Path, encoder: TransformersEncoderEngine, tmp_path: Path
) -> None:
    assert all(name in encoder.version for name in ("triptych/", "transformers/", "torch/", "pillow/"))
    again = encoder_engine(model_dir)
    assert (again.version, again.processor_digest, again.model) == (
        encoder.version,
        encoder.processor_digest,
        encoder.model,
    )
    changed = Path(shutil.copytree(model_dir, tmp_path / "changed"))
    file = changed / "processor_config.json"
    file.write_text(file.read_text().replace('"do_normalize": true', '"do_normalize": false'))
    other = encoder_engine(changed)
    assert other.processor_digest != encoder.processor_digest
    assert other.model.revision != encoder.model.revision


def test_a_directory_without_processor_is_refused(model_dir: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(model_dir, tmp_path / "bare"))
    (bare / "processor_config.json").unlink()
    with pytest.raises(BadModel):
        encoder_engine(bare)


def test_features_that_are_not_finite_are_the_items_fault(
    encoder: TransformersEncoderEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such features are refused before the engine sees them, whose failure would be tried again elsewhere."""
    features = {"pixel_values": torch.full((1, 3, 32, 32), torch.inf)}
    monkeypatch.setattr(ImagePreparer, "process", lambda *_: features)
    with pytest.raises(InvalidMedia, match="the image has values that the model cannot take"):
        encoder.prepare(png(photo()), info_of(png(photo())))
