"""The weights of a language model leave a CUDA device and come back, with CUDA graphs where it has them.

Skipped, and said so, where there is no CUDA device.
"""

from pathlib import Path

import pytest
import torch

from tests.unit.engine.tiny import greedy, make_model, run
from triptych.domain.engine import EngineRequest
from triptych.engine.compute import ComputeOptions
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.decoder.text_engine import TransformersTextEngine

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO CUDA DEVICE: the CUDA paths are not tested here"
)


@pytest.mark.parametrize("compiled", [False, True], ids=["as they are", "compiled"])
def test_answers_are_the_same_after_a_load(tmp_path: Path, *, compiled: bool) -> None:
    engine = TransformersTextEngine(
        make_model(tmp_path),
        EngineOptions(kv_cache_bytes=64 << 20, compile_passes=compiled),
        model_id="m",
        max_embedding_bytes=1 << 20,
        compute=ComputeOptions(device="cuda", dtype="bfloat16"),
        can_unload=True,
    )
    assert engine.weights is not None
    answers = []
    for number in range(2):
        for index in range(4):
            engine.add(EngineRequest(f"{number}{index}", tuple(range(20, 40 + index)), (), greedy(12, ignore_eos=True)))
        answers.append(list(run(engine).values()))
        before = torch.cuda.memory_allocated()
        engine.weights.before_unload()
        engine.weights.unload()
        assert before - torch.cuda.memory_allocated() >= engine.weights.nbytes
        taken = torch.empty(
            engine.weights.nbytes, dtype=torch.uint8, device="cuda"
        )  # so that the weights get another place
        engine.weights.load()
        engine.weights.after_load()
        del taken
    assert answers[0] == answers[1]
