import asyncio
import subprocess
import sys
import threading

import pytest

from triptych.transport.daemon_threads import DaemonThreadPool


async def test_a_call_returns_or_raises_the_functions_result() -> None:
    pool = DaemonThreadPool("test", limit=1)
    assert await pool.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await pool.run(divmod, 7, 0)
    assert pool.calls == 0


async def test_an_abandoned_call_keeps_its_thread_until_it_ends() -> None:
    pool, go_on = DaemonThreadPool("test", limit=1), threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await pool.run(go_on.wait)
    assert pool.calls == 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await pool.run(divmod, 7, 2)
    go_on.set()
    async with asyncio.timeout(60):
        assert await pool.run(divmod, 7, 2) == (3, 1)


@pytest.mark.slow
def test_a_hanging_call_does_not_block_the_exit() -> None:
    code = """if True:
        import asyncio, threading
        from triptych.transport.daemon_threads import DaemonThreadPool

        async def main():
            async with asyncio.timeout(0.05):
                await DaemonThreadPool("test", limit=1).run(threading.Event().wait)

        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "TimeoutError" in done.stderr
