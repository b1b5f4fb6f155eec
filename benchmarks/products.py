"""Products of linear layers with plain and with packed weights, and which of the two an engine chooses at start (``engine/packed_weights``).

Shapes are those of a vision encoder of 100 million parameters, and of language models of 50 million and half a billion. The two
alternate; times are the fastest of several runs on one thread or more, and mean something as ratios within the run. The rule before this
measurement was to use packed weights for 2 to 512 rows on every machine.
"""

import argparse
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import nn

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from triptych.engine.packed_weights import ROWS, PackedProduct, faster_packed
from triptych.engine.timing import timed_s

SHAPES = ((2304, 768), (768, 768), (3072, 768), (768, 3072), (2048, 512), (512, 2048), (4864, 896), (896, 4864))
"""Outputs and inputs."""
_MANY = 2048
_LEAST, _LONGEST_S = 4, 1.0


@dataclass(frozen=True, slots=True)
class Product:
    """Milliseconds of a product, and what was chosen."""

    outputs: int
    inputs: int
    rows: int
    plain_ms: float
    packed_ms: float
    chosen_packed: bool

    @property
    def ratio(self) -> float:
        """Packed to plain."""
        return self.packed_ms / self.plain_ms

    @property
    def to_before(self) -> float:
        """What is chosen, to the rule before."""
        before_ms = self.packed_ms if 1 < self.rows <= 512 else self.plain_ms
        return (self.packed_ms if self.chosen_packed else self.plain_ms) / before_ms


@torch.inference_mode()
def measured(shape: tuple[int, int]) -> list[Product]:
    layer = nn.Linear(shape[1], shape[0])
    packed = PackedProduct(layer)
    chosen = faster_packed(layer, packed, 1)
    products: list[Product] = []
    for rows, chosen_packed in zip((*ROWS, _MANY), (*chosen, chosen[-1]), strict=True):
        hidden = torch.randn(rows, shape[1])
        taken_s = 0.0
        samples: list[tuple[float, float]] = []
        while len(samples) < _LEAST or (taken_s < _LONGEST_S and len(samples) < 100 * _LEAST):
            samples.append((timed_s(partial(layer, hidden)), timed_s(partial(packed, hidden))))
            taken_s += sum(samples[-1])
        plain_s, packed_s = map(min, zip(*samples, strict=True))
        products.append(Product(*shape, rows, round(1e3 * plain_s, 4), round(1e3 * packed_s, 4), chosen_packed))
    return products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one shape: shows that it works")
    arguments = parser.parse_args()
    ending.by_sigterm()
    torch.set_num_threads(arguments.threads)
    described = machine.describe() | {"instructions": torch.backends.cpu.get_cpu_capability()}
    print(f"{described['cpu']}, {described['instructions']}, {arguments.threads} threads", flush=True)
    print(f"{'layer':>12} {'rows':>5} {'plain':>10} {'packed':>10} {'ratio':>6}  {'chosen':<7} to the rule before")
    products: list[Product] = []
    for shape in SHAPES[:1] if arguments.quick else SHAPES:
        for one in measured(shape):
            products.append(one)
            print(
                f"{one.outputs:>6}x{one.inputs:<5} {one.rows:>5} {one.plain_ms:>8.3f}ms {one.packed_ms:>8.3f}ms {one.ratio:>6.2f}"
                f"  {'packed' if one.chosen_packed else 'plain':<7} {one.to_before:.2f}",
                flush=True,
            )
    write_figures(
        arguments.json,
        {"machine": described, "threads": arguments.threads, "products": [asdict(one) for one in products]},
    )


if __name__ == "__main__":
    main()
