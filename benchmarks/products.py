"""Products of linear layers, plain, by oneDNN, packed and compiled, and which an engine chooses at start (``engine/fastest_products``).

Shapes are those of a vision encoder of 100 million parameters, and of language models of 50 million and half a billion. Of each shape
there are as many layers as are larger than a cache together, computed in turns as in a pass. The products alternate, as do torch's attention,
that by products (``engine/product_attention``) and, of prompts, the compiled one (``engine/prompt_kernel``); times are the fastest of several samples, and mean
something as ratios within the run.
``before`` is the choice without oneDNN's product of plain weights.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from triptych.engine.compute import ComputeOptions
from triptych.engine.fastest_products import ROWS, fastest
from triptych.engine.linear_products import (
    By,
    CompiledProduct,
    Make,
    OneDnnProduct,
    PackedProduct,
    PlainProduct,
    Product,
)
from triptych.engine.product_attention import product_attention
from triptych.engine.product_times import Alike, product_times_s
from triptych.engine.prompt_kernel import attend_prompt, rows_per_block
from triptych.engine.torch_process import prepare_torch
from triptych.engine.worker_threads import WorkerThreads

SHAPES = ((2304, 768), (768, 768), (3072, 768), (768, 3072), (2048, 512), (512, 2048), (4864, 896), (896, 4864))
"""Outputs and inputs."""
PROMPTS = (
    (2, 7, 128, 128, 64),
    (2, 7, 128, 1000, 64),
    (4, 3, 128, 2000, 64),
    (2, 4, 128, 500, 64),
    (2, 7, 54, 500, 64),
    (2, 4, 256, 1000, 64),
    (2, 2, 900, 900, 64),
)
"""Attention of parts of prompts: heads of keys, heads that share one, rows, positions, size of a head."""
IMAGES = ((12, 1, 257, 257, 64), (16, 1, 577, 577, 64), (16, 1, 1024, 1024, 80), (16, 1, 4096, 4096, 80))
"""The same of images."""
KINDS = (By.PLAIN, By.ONEDNN, By.PACKED, By.COMPILED)
_TOGETHER_NBYTES = 96 << 20
_LEAST, _LONGEST_S = 4, 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds of a product of each kind, and what was chosen."""

    outputs: int
    inputs: int
    rows: int
    plain_ms: float
    onednn_ms: float
    packed_ms: float
    compiled_ms: float
    chosen: str
    before: str

    @property
    def to_before(self) -> float:
        """What is chosen, to what was chosen before."""
        times_ms: dict[str, float] = {by.value: getattr(self, f"{by.value}_ms") for by in KINDS}
        return times_ms[self.chosen] / times_ms[self.before]


@torch.inference_mode()
def measured(shape: tuple[int, int], threads: WorkerThreads) -> list[Measured]:
    count = max(1, _TOGETHER_NBYTES // (4 * shape[0] * shape[1]))
    layers = [nn.Linear(shape[1], shape[0]) for _ in range(count)]
    makes: dict[By, Make] = {
        By.PLAIN: PlainProduct,
        By.ONEDNN: OneDnnProduct,
        By.PACKED: PackedProduct,
        By.COMPILED: partial(CompiledProduct, threads=threads),
    }
    (times_s,) = product_times_s([Alike(layers, makes)], ROWS)
    kinds = [[make(layer) for layer in layers] for make in makes.values()]
    found: list[Measured] = []
    for rows, by_kind in zip(ROWS, times_s, strict=True):
        now = fastest(by_kind)
        formerly = fastest({by: time_s for by, time_s in by_kind.items() if by is not By.ONEDNN})
        hidden = torch.randn(rows, shape[1])
        times_ms = _times_ms([partial(_compute, products, hidden) for products in kinds])
        plain_ms, onednn_ms, packed_ms, compiled_ms = (round(time_ms / count, 4) for time_ms in times_ms)
        found.append(Measured(*shape, rows, plain_ms, onednn_ms, packed_ms, compiled_ms, now.value, formerly.value))
    return found


@dataclass(frozen=True, slots=True)
class Attention:
    """Milliseconds of the attention of one layer; compiled of prompts alone."""

    kv_heads: int
    group: int
    rows: int
    positions: int
    size: int
    causal: bool
    torch_ms: float
    products_ms: float
    compiled_ms: float | None


@torch.inference_mode()
def attention(shape: tuple[int, int, int, int, int], *, causal: bool) -> Attention:
    kv_heads, group, rows, positions, size = shape
    query = torch.randn(kv_heads, group, rows, size)
    keys, values = (torch.randn(positions, kv_heads, size).transpose(0, 1) for _ in range(2))
    mask = torch.full((rows, positions), -torch.inf).triu_(positions - rows + 1) if causal else None

    def by_torch() -> None:
        k, v = (tensor[:, None].expand(-1, group, -1, -1) for tensor in (keys, values))
        scaled_dot_product_attention(query, k, v, attn_mask=mask)

    def by_products() -> None:
        product_attention(query, keys, values, scaling=size**-0.5, is_causal=causal)

    heads = np.random.default_rng(0).standard_normal((rows, (group + 2) * kv_heads, size), np.float32)
    memory = [np.ascontiguousarray(tensor.transpose(0, 1).numpy()) for tensor in (keys, values)]
    attended, slots = np.empty((rows, group * kv_heads, size), np.float32), np.arange(positions)
    units = kv_heads * -(-rows // rows_per_block(group, positions))

    def compiled() -> None:
        attend_prompt(heads, memory[0], memory[1], slots, 0, np.float32(size**-0.5), 0, units, attended)

    times_ms = _times_ms([by_torch, by_products, *([compiled] if causal else [])])
    torch_ms, products_ms, *compiled_ms = (round(time_ms, 4) for time_ms in times_ms)
    return Attention(*shape, causal, torch_ms, products_ms, compiled_ms[0] if compiled_ms else None)


def _times_ms(calls: Sequence[Callable[[], None]]) -> list[float]:
    """Of each the fastest of several samples, which take turns."""
    began_s, samples = time.perf_counter(), list[list[float]]()
    while len(samples) < _LEAST or time.perf_counter() - began_s < _LONGEST_S:
        samples.append([_time_s(call) for call in calls])
    return [1e3 * min(times_s) for times_s in zip(*samples, strict=True)]


def _time_s(call: Callable[[], None]) -> float:
    began_s = time.thread_time()
    call()
    return time.thread_time() - began_s


def _compute(products: Sequence[Product], hidden: torch.Tensor) -> None:
    for product in products:
        product(hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one shape: shows that it works")
    arguments = parser.parse_args()
    ending.by_sigterm()
    prepare_torch(ComputeOptions(torch_threads=arguments.threads))
    described = machine.describe() | {"instructions": torch.backends.cpu.get_cpu_capability()}
    print(f"{described['cpu']}, {described['instructions']}, {arguments.threads} threads", flush=True)
    print(
        f"{'layer':>12} {'rows':>5} {'plain':>10} {'onednn':>10} {'packed':>10} {'compiled':>10}  {'chosen':<9} to before"
    )
    threads = WorkerThreads(arguments.threads)
    products: list[Measured] = []
    for shape in SHAPES[:1] if arguments.quick else SHAPES:
        for product in measured(shape, threads):
            products.append(product)
            print(
                f"{product.outputs:>6}x{product.inputs:<5} {product.rows:>5} {product.plain_ms:>8.3f}ms {product.onednn_ms:>8.3f}ms {product.packed_ms:>8.3f}ms {product.compiled_ms:>8.3f}ms"
                f"  {product.chosen:<9} {product.to_before:.2f}",
                flush=True,
            )
    attentions: list[Attention] = []
    for shapes, causal in ((PROMPTS, True), (IMAGES, False)):
        for layer in shapes[:1] if arguments.quick else shapes:
            attentions.append(found := attention(layer, causal=causal))
            print(
                f"attention of {found.rows} rows before {found.positions} positions, {found.kv_heads} x {found.group} heads of {found.size}:"
                f" torch {found.torch_ms:.2f} ms, products {found.products_ms:.2f} ms ({found.products_ms / found.torch_ms:.2f})"
                + (
                    ""
                    if found.compiled_ms is None
                    else f", compiled {found.compiled_ms:.2f} ms ({found.compiled_ms / found.torch_ms:.2f})"
                ),
                flush=True,
            )
    write_figures(
        arguments.json,
        {
            "machine": described,
            "threads": arguments.threads,
            "products": [asdict(product) for product in products],
            "attention": [asdict(figures) for figures in attentions],
        },
    )


if __name__ == "__main__":
    main()
