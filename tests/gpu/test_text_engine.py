"""The text engine on CUDA: bfloat16, the paged kernel against the gathers, answers against the CPU's.

Skipped, and said so, where there is no CUDA device. Nothing of this folder has been run on one yet.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.engine.tiny import greedy, make_model, run, text_engine
from triptych.engine.decoder.paged_attention import FLASH_BLOCK_TOKENS, has_paged_kernel, paged_attention, paged_layout
from triptych.engine.decoder.setup import KvOptions
from triptych.ports import EngineRequest

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO CUDA DEVICE: the CUDA paths are not tested here"
)
CUDA = torch.device("cuda")


def requests() -> list[EngineRequest]:
    return [
        EngineRequest(f"r{n}", tuple(4 + (7 * n + i) % 100 for i in range(3 + 40 * n)), (), greedy(12, ignore_eos=True))
        for n in range(6)
    ]


def test_float32_answers_equal_those_of_the_cpu(tmp_path: Path) -> None:
    directory = make_model(tmp_path)
    answers = []
    for device in ("cpu", "cuda"):
        engine = text_engine(directory, device=device)
        for request in requests():
            engine.add(request)
        answers.append(run(engine))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("block_tokens", [None, 16], ids=["the paged kernel", "gathers"])
def test_bfloat16_runs_on_both_paths(tmp_path: Path, block_tokens: int | None) -> None:
    engine = text_engine(
        make_model(tmp_path), device="cuda", dtype="bfloat16", kv_cache_bytes=64 << 20, kv=KvOptions(block_tokens)
    )
    for request in requests():
        engine.add(request)
    assert all(len(answer) == 12 for answer in run(engine).values())


def test_replayed_decoding_equals_eager(tmp_path: Path) -> None:
    """Sequences come and go, so that several graphs are used; the same kernels compute both."""
    if not has_paged_kernel(CUDA, torch.bfloat16):
        pytest.skip("THIS TORCH HAS NO PAGED KERNEL: CUDA graphs are not tested here")
    answers = []
    for enforce_eager in (True, False):
        engine = text_engine(
            make_model(tmp_path),
            device="cuda",
            dtype="bfloat16",
            kv_cache_bytes=64 << 20,
            max_sequences=6,
            enforce_eager=enforce_eager,
        )
        for request in requests():
            engine.add(request)
        answers.append(run(engine))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("block_tokens", [None, 16])
def test_preempted_sequences_go_on_from_pinned_memory(tmp_path: Path, block_tokens: int | None) -> None:
    """Float32, so that answers do not depend on what is computed together."""
    directory = make_model(tmp_path)
    long = [replace(one, sampling=greedy(200, ignore_eos=True)) for one in requests()]
    answers = []
    for kv_cache_bytes in (64 << 20, 900 * 768):
        engine = text_engine(directory, device="cuda", kv_cache_bytes=kv_cache_bytes, kv=KvOptions(block_tokens))
        for request in long:
            engine.add(request)
        answers.append(run(engine))
    assert answers[0] == answers[1]
    assert engine.kv_copies.back


@pytest.mark.parametrize("window", [None, 100])
def test_the_paged_kernel_equals_reference_attention(window: int | None) -> None:
    if not has_paged_kernel(CUDA, torch.bfloat16):
        pytest.skip("THIS TORCH HAS NO PAGED KERNEL: it is not tested here")
    torch.manual_seed(0)
    counts, lengths, size = [1, 1, 40], [300, 17, 290], FLASH_BLOCK_TOKENS
    tables = [[3, 0], [2], [5, 1]]
    keys, values = (torch.randn(6 * size, 2, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(1, 8, sum(counts), 64, device=CUDA, dtype=torch.bfloat16)
    layout = paged_layout(counts, lengths, tables, size, CUDA)
    out = paged_attention(layout, query, keys, values, 0.125, window)[0].float()
    row = 0
    for count, length, table in zip(counts, lengths, tables, strict=True):
        slots = [block * size + at for block in table for at in range(size)][:length]
        k, v = (memory[slots].float().repeat_interleave(4, 1) for memory in (keys, values))
        for at in range(count):
            last = length - count + at
            first = 0 if window is None else max(0, last - window + 1)
            scores = torch.einsum("hd,thd->ht", query[0, :, row].float(), k[first : last + 1]) * 0.125
            expected = torch.einsum("ht,thd->hd", scores.softmax(-1), v[first : last + 1])
            torch.testing.assert_close(out[row], expected, atol=2e-2, rtol=2e-2)
            row += 1
