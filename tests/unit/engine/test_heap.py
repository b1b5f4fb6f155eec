"""Memory freed by one pass is reused by the next."""

import resource
import sys

import pytest
import torch

from triptych.engine.heap import LARGEST_NBYTES, keep_freed


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc's heap can be told")
def test_a_second_pass_finds_its_pages() -> None:
    if not keep_freed():
        pytest.skip("only glibc's heap can be told")

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        held = [torch.empty(LARGEST_NBYTES // 4 - 1024, dtype=torch.uint8) for _ in range(4)]
        for tensor in held:
            tensor.fill_(1)
        del held, tensor
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    for _ in range(3):  # until the heap has grown to what is held at once
        faults()
    pages = LARGEST_NBYTES // resource.getpagesize()
    assert max(faults() for _ in range(3)) < pages // 50
