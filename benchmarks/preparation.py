"""Seconds that transformers' image processors take for one image on one core: decoding apart from the rest.

The images are noise, saved as JPEG. The processors are those with PIL and numpy, which need no torchvision.
"""

import argparse
import io
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures

ROUNDS = 25


@dataclass(frozen=True, slots=True)
class Case:
    """An image of a model, and what processes it."""

    model: str
    side_px: int
    process: Callable[[Image.Image], object]


def cases() -> Sequence[Case]:
    """As the models' ``preprocessor_config.json`` have them."""
    mllama = MllamaImageProcessorPil(size={"height": 560, "width": 560}, max_image_tiles=4)
    internvl = GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, crop_to_patches=True, min_patches=1, max_patches=12
    )
    qwen = Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096},
    )
    return [
        Case("Llama 3.2 Vision", 500, lambda image: mllama(images=[image])),
        Case("InternVL", 500, lambda image: internvl(images=[image])),
        Case("Qwen3-VL", 640, lambda image: qwen(images=[image])),
    ]


@dataclass(frozen=True, slots=True)
class Taken:
    """Medians, milliseconds."""

    model: str
    side_px: int
    decode_ms: float
    process_ms: float


def measured(case: Case, rounds: int) -> Taken:
    """Of that many rounds, after one that does not count."""
    noise = np.random.default_rng(1).integers(0, 256, (case.side_px, case.side_px, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, format="JPEG")
    decode_s, process_s = list[float](), list[float]()
    for _ in range(rounds + 1):
        began_s = time.process_time()
        image = Image.open(io.BytesIO(file.getvalue())).convert("RGB")
        decoded_s = time.process_time()
        case.process(image)
        decode_s.append(decoded_s - began_s)
        process_s.append(time.process_time() - decoded_s)
    return Taken(case.model, case.side_px, *(1000 * statistics.median(each[1:]) for each in (decode_s, process_s)))


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="two rounds: shows that it works")
    options = parser.parse_args()
    torch.set_num_threads(1)
    on, rounds = machine.describe(), 2 if options.quick else ROUNDS
    print("; ".join(f"{key} {value}" for key, value in on.items()))
    taken = [measured(case, rounds) for case in cases()]
    for row in taken:
        print(f"{row.model}, {row.side_px} px: {row.decode_ms:.1f} ms to decode, {row.process_ms:.1f} ms to process")
    write_figures(options.json, {"machine": on, "rounds": rounds, "figures": [asdict(row) for row in taken]})


if __name__ == "__main__":
    main()
