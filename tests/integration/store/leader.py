"""``python -m tests.integration.store.leader HOST:PORT NAME``: campaigns, and prints the time and its token, 0 for none."""

import asyncio
import sys

from triptych.runtime.clock import monotonic
from triptych.store.leadership import Leadership, LeaseTimes
from triptych.store.redis import RedisStore
from triptych.store.redis_settings import RedisSettings

TIMES = LeaseTimes(lease_ttl_s=1.0, lease_margin_s=0.2, lease_retry_s=0.2)


async def main(target: str, name: str) -> None:
    store = RedisStore(RedisSettings(redis=target))
    leadership = Leadership(store, lease="leader", owner=name, times=TIMES, clock=monotonic)
    async with asyncio.TaskGroup() as group:
        group.create_task(leadership.run())
        while True:
            now_s = monotonic()  # before the question, so that a stop in between cannot make an answer look late
            fence = leadership.fence
            sys.stdout.write(f"{now_s} {0 if fence is None else fence.token}\n")
            sys.stdout.flush()
            await asyncio.sleep(0.02)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
