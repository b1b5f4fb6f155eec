import threading

import pytest

from triptych.runtime.offload import ThreadOffload


async def test_work_runs_in_a_thread_of_the_pool() -> None:
    offload = ThreadOffload(1, name="pool")
    try:
        assert await offload.run(lambda a, b: (a + b, threading.current_thread().name), 1, 2) == (3, "pool_0")
        with pytest.raises(ZeroDivisionError):
            await offload.run(lambda: 1 / 0)
    finally:
        offload.close()
