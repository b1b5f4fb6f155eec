"""Products of linear layers, plain, packed and compiled, and which of them an engine chooses at start (``engine/linear_products``).

Shapes are those of a vision encoder of 100 million parameters, and of language models of 50 million and half a billion. Of each shape
there are as many layers as are larger than a cache together, computed in turns as in a pass. The products alternate; times are the
fastest of several samples, and mean something as ratios within the run. ``before`` is the choice between plain and packed alone.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import nn

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from triptych.engine.linear_products import ROWS, By, CompiledProduct, Make, PackedProduct, Product, fastest
from triptych.engine.worker_threads import WorkerThreads

SHAPES = ((2304, 768), (768, 768), (3072, 768), (768, 3072), (2048, 512), (512, 2048), (4864, 896), (896, 4864))
"""Outputs and inputs."""
_TOGETHER_NBYTES = 96 << 20
_LEAST, _LONGEST_S = 4, 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds of a product of each kind, and what was chosen."""

    outputs: int
    inputs: int
    rows: int
    plain_ms: float
    packed_ms: float
    compiled_ms: float
    chosen: str
    before: str

    @property
    def to_before(self) -> float:
        """What is chosen, to what was chosen before."""
        times_ms = {"plain": self.plain_ms, "packed": self.packed_ms, "compiled": self.compiled_ms}
        return times_ms[self.chosen] / times_ms[self.before]


@torch.inference_mode()
def measured(shape: tuple[int, int], threads: WorkerThreads) -> list[Measured]:
    count = max(1, _TOGETHER_NBYTES // (4 * shape[0] * shape[1]))
    layers = [nn.Linear(shape[1], shape[0]) for _ in range(count)]
    makes: dict[By, Make] = {By.PACKED: PackedProduct, By.COMPILED: partial(CompiledProduct, threads=threads)}
    chosen = fastest(layers, makes, 1)
    before = fastest(layers, {By.PACKED: PackedProduct}, 1)
    kinds: list[Sequence[Product]] = [layers, *([make(layer) for layer in layers] for make in makes.values())]
    found: list[Measured] = []
    for rows, now, formerly in zip(ROWS, chosen, before, strict=True):
        hidden = torch.randn(rows, shape[1])
        began_s, samples = time.perf_counter(), list[list[float]]()
        while len(samples) < _LEAST or time.perf_counter() - began_s < _LONGEST_S:
            samples.append([_all_s(products, hidden) / count for products in kinds])
        plain_ms, packed_ms, compiled_ms = (round(1e3 * min(one), 4) for one in zip(*samples, strict=True))
        found.append(Measured(*shape, rows, plain_ms, packed_ms, compiled_ms, now.value, formerly.value))
    return found


def _all_s(products: Sequence[Product], hidden: torch.Tensor) -> float:
    began_s = time.thread_time()
    for product in products:
        product(hidden)
    return time.thread_time() - began_s


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
    print(f"{'layer':>12} {'rows':>5} {'plain':>10} {'packed':>10} {'compiled':>10}  {'chosen':<9} to before")
    threads = WorkerThreads(arguments.threads)
    products: list[Measured] = []
    for shape in SHAPES[:1] if arguments.quick else SHAPES:
        for one in measured(shape, threads):
            products.append(one)
            print(
                f"{one.outputs:>6}x{one.inputs:<5} {one.rows:>5} {one.plain_ms:>8.3f}ms {one.packed_ms:>8.3f}ms {one.compiled_ms:>8.3f}ms"
                f"  {one.chosen:<9} {one.to_before:.2f}",
                flush=True,
            )
    write_figures(
        arguments.json,
        {"machine": described, "threads": arguments.threads, "products": [asdict(one) for one in products]},
    )


if __name__ == "__main__":
    main()
