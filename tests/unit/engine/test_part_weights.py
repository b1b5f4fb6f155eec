"""The weights of a part leave the memory and come back with equal values, from files or from host memory."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from tests.unit.engine.tiny import make_model
from triptych.demo import MODEL_DIR
from triptych.domain.embedding import DType
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import open_checkpoint
from triptych.engine.fastest_products import choose_products, load_copies, unload_copies
from triptych.engine.host_memory import available_nbytes
from triptych.engine.linear_products import By
from triptych.engine.part_weights import PartWeights
from triptych.engine.weight_loading import load_part
from triptych.errors import Unavailable

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.mark.parametrize("part", list(ModelPart))
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_values_are_the_same_after_a_load(part: ModelPart, dtype: DType) -> None:
    checkpoint = open_checkpoint(MODEL_DIR)
    model = load_part(checkpoint, part, dtype=dtype, device=CPU)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    weights = PartWeights(model, checkpoint)
    assert weights.kept_nbytes == 0, "all of it is in the files"
    assert weights.nbytes >= sum(tensor.nbytes for tensor in before.values())
    for _ in range(2):
        weights.unload()
        assert (weights.resident, _are_equal(model, before)) == (False, False)
        weights.load()
        assert weights.load_s > 0
        assert (weights.resident, _are_equal(model, before)) == (True, True)


def _are_equal(model: nn.Module, values: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(values[name], parameter) for name, parameter in model.named_parameters())


def test_what_is_in_no_file_is_kept_in_host_memory(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path))
    model = load_part(checkpoint, ModelPart.DECODER, dtype=DType.F32, device=CPU)
    parameter = next(parameter for parameter in model.parameters() if parameter.dim() > 1)
    parameter.data += 1
    expected = parameter.clone()
    weights = PartWeights(model, checkpoint)
    assert weights.kept_nbytes == parameter.nbytes
    weights.unload()
    weights.load()
    assert torch.equal(parameter, expected)


def test_a_load_that_fails_leaves_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    model_dir, free = tmp_path / "model", [1 << 40]
    shutil.copytree(MODEL_DIR, model_dir)
    checkpoint = open_checkpoint(model_dir)
    weights = PartWeights(
        load_part(checkpoint, ModelPart.ENCODER, dtype=DType.F32, device=CPU), checkpoint, free_nbytes=lambda: free[0]
    )
    weights.unload()
    free[0] = 5
    with pytest.raises(Unavailable, match=f"they take {weights.nbytes} bytes, 5 are free"):
        weights.load()
    free[0] = 1 << 40
    file, away = model_dir / "model.safetensors", tmp_path / "away"
    file.rename(away)
    with pytest.raises(Unavailable, match=r"^weights cannot be loaded: model.safetensors: No such file"):
        weights.load()
    assert not weights.resident
    away.rename(file)
    os.utime(file, (1, 1))
    with pytest.raises(Unavailable, match="has changed since the start"):
        weights.load()


def test_memory_goes_back_to_the_system_with_the_packed_copies() -> None:
    """A layer of 64 MiB; packed it has as much again."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4096, 4096, bias=False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.inner(rows)
            return made

    model = Layer().requires_grad_(False)
    weights = PartWeights(model, open_checkpoint(MODEL_DIR))
    packed = choose_products(
        model, most_packed_nbytes=1 << 30, measure=lambda _, rows: [[{By.PACKED: 1.0}] * len(rows)]
    )
    weights.also(load=lambda: load_copies(model), unload=lambda: unload_copies(model))
    rows = torch.rand(8, 4096)
    expected, before = model(rows), psutil.Process().memory_info().rss
    weights.unload()
    assert before - psutil.Process().memory_info().rss > 0.9 * (weights.nbytes + packed)
    weights.load()
    assert torch.equal(model(rows), expected)


def test_free_memory_is_the_least_that_the_machine_and_the_control_groups_leave(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n",
        "proc/self/cgroup": "0::/one/two\n",
        "sys/fs/cgroup/one/memory.max": "5000000\n",
        "sys/fs/cgroup/one/memory.current": "4000000\n",
        "sys/fs/cgroup/one/memory.stat": "anon 7\ninactive_file 300000\n",
        "sys/fs/cgroup/one/two/memory.max": "max\n",
    }
    assert available_nbytes(tmp_path) is None
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_nbytes(tmp_path) == 1_300_000
    (tmp_path / "sys/fs/cgroup/one/memory.max").write_text("max\n")
    assert available_nbytes(tmp_path) == 8000 * 1024
