"""The text engine on CUDA: bfloat16, the paged kernel against its reference, answers against the CPU's.

Skipped, and said so, where there is no CUDA device.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.engine.on_cuda import reference_attention
from tests.unit.engine.tiny import greedy, make_model, run, text_engine
from triptych.domain.engine import EngineRequest
from triptych.engine.decoder import setup
from triptych.engine.decoder.paged_attention import has_paged_kernel, paged_attention, paged_layout
from triptych.engine.decoder.setup import KvOptions
from triptych.families.base import Span

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


@pytest.mark.parametrize("paged", [True, False], ids=["the paged kernel", "gathers"])
def test_bfloat16_runs_on_both_paths(tmp_path: Path, paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "has_paged_kernel", lambda device: paged)
    engine = text_engine(make_model(tmp_path), device="cuda", dtype="bfloat16", kv_cache_bytes=64 << 20)
    for request in requests():
        engine.add(request)
    assert all(len(answer) == 12 for answer in run(engine).values())


def test_replayed_passes_equal_eager_ones(tmp_path: Path) -> None:
    """Sequences come and go, so that several graphs are used. Float32, as keys are divided otherwise in a graph."""
    assert has_paged_kernel(CUDA)
    answers = []
    for enforce_eager, compiled in ((True, False), (False, False), (False, True)):
        engine = text_engine(
            make_model(tmp_path),
            device="cuda",
            max_sequences=6,
            enforce_eager=enforce_eager,
            compile_passes=compiled,
        )
        for request in requests():
            engine.add(request)
            answers.append(run(engine, engine.step()))
        for request in requests():
            engine.add(request)
        answers.append(run(engine))
    third = len(answers) // 3
    assert answers[:third] == answers[third : 2 * third] == answers[2 * third :]


@pytest.mark.parametrize("block_tokens", [None, 16])
def test_preempted_sequences_go_on_from_pinned_memory(tmp_path: Path, block_tokens: int | None) -> None:
    """Float32, so that answers do not depend on what is computed together."""
    directory = make_model(tmp_path)
    long = [replace(request, sampling=greedy(200, ignore_eos=True)) for request in requests()]
    answers = []
    for kv_cache_bytes in (64 << 20, 900 * 768):
        engine = text_engine(directory, device="cuda", kv_cache_bytes=kv_cache_bytes, kv=KvOptions(block_tokens))
        for request in long:
            engine.add(request)
        answers.append(run(engine))
    assert answers[0] == answers[1]
    assert engine.kv_copies.back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(8, 2, 64), (28, 4, 128), (7, 1, 80), (4, 4, 256), (16, 1, 16)]
)
def test_the_paged_kernel_equals_reference_attention(
    dtype: torch.dtype, window: int | None, heads: int, kv_heads: int, size: int
) -> None:
    """Decodes alone, whose keys are divided among programs, prompts in part and whole, and both with bidirectional spans."""
    torch.manual_seed(0)
    shapes = ([1] * 3, [1, 300, 1700]), ([1, 1, 200, 40], [300, 17, 200, 290]), ([1] * 200, [*range(2, 202)])
    for counts, lengths in shapes:
        blocks = iter(torch.randperm(2000).tolist())
        tables = [[next(blocks) for _ in range(-(-length // 16))] for length in lengths]
        keys, values = (torch.randn(2000 * 16, kv_heads, size, device=CUDA, dtype=dtype) for _ in range(2))
        query = torch.randn(1, heads, sum(counts), size, device=CUDA, dtype=dtype)
        spans = [(Span(3, 60), Span(150, 500)) if count > 1 else () for count in counts]
        for bidirectional in ([()] * len(counts), spans):
            layout = paged_layout(counts, lengths, tables, bidirectional, 16, CUDA, group=heads // kv_heads)
            found = paged_attention(layout, query, keys, values, 0.125, window)
            expected = reference_attention(layout, query.float(), keys.float(), values.float(), 0.125, window)
            close = 2e-2 if dtype is torch.bfloat16 else 2e-5
            torch.testing.assert_close(found.float(), expected, atol=close, rtol=close)
