"""Encoding by vLLM's encoder and by Triptych's own, side by side: the same prepared images, in turns, in one process.

The model is a Qwen2.5-VL with random weights (``random_qwen``), in float32 on one thread; vLLM comes from its own environment
(``make vllm-environment``). A figure is the median of the rounds, in milliseconds of CPU time per image; ratios are of the same round.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from benchmarks.random_qwen import Shape, image_tokens, make
from triptych.engine.checkpoint import open_checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.engine.encoder import AdapterEncoderEngine, PreparedMedia, TransformersEncoderEngine
from triptych.engine.measuring import EncoderProbe
from triptych.engine.probe_media import image
from triptych.integrations.vllm.encoder import VllmEncoderEngine

FULL = Shape()
QUICK = Shape(vision_layers=2, vision_width=128, text_layers=1, text_width=128, vocabulary=512)


@dataclass(frozen=True, slots=True)
class Settings:
    rounds: int
    shape: Shape = FULL
    sides_px: tuple[int, ...] = (224, 448)
    batches: tuple[int, ...] = (1, 4)
    torch_threads: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    side_px: int
    tokens: int
    batch: int
    own_ms: float
    vllm_ms: float
    vllm_to_own: tuple[float, float, float]
    """Least, median and largest ratio of the rounds."""


def measure(settings: Settings) -> Iterator[Row]:
    compute = ComputeOptions(torch_threads=settings.torch_threads)
    with tempfile.TemporaryDirectory() as directory:
        make(Path(directory), settings.shape)
        checkpoint = open_checkpoint(Path(directory))
        own = TransformersEncoderEngine(checkpoint, model_id="random", compute=compute)
        vllm = VllmEncoderEngine(checkpoint, "", model_id="random", compute=compute)
        try:
            for side_px in settings.sides_px:
                item = EncoderProbe(own).prepared(image(side_px))
                assert item.tokens == image_tokens(side_px)
                for batch in settings.batches:
                    yield _row(own, vllm, [item] * batch, side_px, settings.rounds)
        finally:
            vllm.close()


def _row(
    own: AdapterEncoderEngine, vllm: AdapterEncoderEngine, batch: Sequence[PreparedMedia], side_px: int, rounds: int
) -> Row:
    for engine in (own, vllm):
        engine.encode(batch)
    times: dict[AdapterEncoderEngine, list[float]] = {own: [], vllm: []}
    for number in range(rounds):
        for engine in (own, vllm) if number % 2 else (vllm, own):
            began_s = time.process_time()
            engine.encode(batch)
            times[engine].append(1e3 * (time.process_time() - began_s) / len(batch))
    ratios = [second / first for first, second in zip(times[own], times[vllm], strict=True)]
    return Row(
        side_px,
        batch[0].tokens,
        len(batch),
        statistics.median(times[own]),
        statistics.median(times[vllm]),
        (min(ratios), statistics.median(ratios), max(ratios)),
    )


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="only show that it works")
    add_json_option(parser)
    args = parser.parse_args()
    settings = Settings(2, QUICK, sides_px=(56,), batches=(1, 2)) if args.quick else Settings(args.rounds)
    print(f"settings: {asdict(settings)}")
    print("side px  tokens  batch  own ms/image  vllm ms/image  vllm/own (least-largest)")
    rows: list[Row] = []
    for row in measure(settings):
        rows.append(row)
        least, middle, largest = row.vllm_to_own
        print(
            f"{row.side_px:7d}  {row.tokens:6d}  {row.batch:5d}  {row.own_ms:12.2f}  {row.vllm_ms:13.2f}  "
            f"{middle:.2f} ({least:.2f}-{largest:.2f})",
            flush=True,
        )
    said = {
        "machine": machine.describe(),
        "settings": asdict(settings),
        "rows": [asdict(row) for row in rows],
    }
    write_figures(args.json, said)


if __name__ == "__main__":
    main()
