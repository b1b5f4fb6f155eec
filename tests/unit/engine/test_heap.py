import resource
import sys

import pytest
import torch

from triptych.engine.heap import LARGEST_NBYTES, keep_freed


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc's heap has this setting")
def test_a_second_pass_reuses_the_memory_of_the_first() -> None:
    if not keep_freed():
        pytest.skip("only glibc's heap has this setting")

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        held = [torch.empty(LARGEST_NBYTES // 4 - 1024, dtype=torch.uint8) for _ in range(4)]
        for tensor in held:
            tensor.fill_(1)
        del held, tensor
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    for _ in range(12):  # the heap reaches its final size within six
        faults()
    pages = LARGEST_NBYTES // resource.getpagesize()
    assert max(faults() for _ in range(3)) < pages // 50
