"""A process that starts a cluster of stubs, prints their pids, and waits to be killed."""

import asyncio
import sys
from pathlib import Path

from triptych.cli import process_plan
from triptych.cli.cluster import LocalCluster

process_plan.package_of = lambda service: "tests.unit.cli.stub_service"


async def main() -> None:
    instances = {"gateway": ("--instances", "encoder-1,text-1")}
    async with LocalCluster("demo", roles="E:1,PD:1", options=instances, log_dir=Path(sys.argv[1])) as cluster:
        sys.stdout.write(" ".join(map(str, cluster.processes.values())) + "\n")
        sys.stdout.flush()
        await cluster.next_exit()


asyncio.run(main())
