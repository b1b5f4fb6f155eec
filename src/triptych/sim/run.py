"""One run of a deployment under a plan: the real services in virtual time, from the first request to the last answer."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Protocol

from triptych.domain.generation import ChatFinished, TokenChunk
from triptych.domain.timeline import Timeline
from triptych.errors import NotFound, TriptychError
from triptych.virtual import virtual_time
from triptych.workload.report import TIMEOUT, Record
from triptych.workload.requests import Plan, Planned

from .cluster import SimCluster, running
from .outcome import Decision, Outcome
from .prepare import chat_request
from .samples import Sampler
from .scenario import Deployment

HOPS = 2
"""Messages before the router has a request, and before a caller has a token: from the client to the gateway, and on."""
_SETTLING_S = 3600.0
"""How long a run may go on after its last request came, beside the requests' time limit."""

Note = Callable[[Record], None]


class Simulate(Protocol):
    """A fidelity: serves the requests of a plan."""

    def __call__(
        self,
        deployment: Deployment,
        plan: Plan,
        *,
        seed: int = 0,
        timeout_s: float = 300.0,
        keeps_spans: bool = False,
        note: Note = lambda _: None,
    ) -> Outcome: ...


def simulate(
    deployment: Deployment,
    plan: Plan,
    *,
    seed: int = 0,
    timeout_s: float = 300.0,
    keeps_spans: bool = False,
    note: Note = lambda _: None,
) -> Outcome:
    """Serve the requests of a plan; ``note`` gets each record as its request ends. ``keeps_spans``: the outcome has them.

    The same arguments give the same outcome, but for ``took_s``. Ctrl-C ends the run, and its outcome has what there is. Raises CannotStart for a deployment that no instance could start with.
    """
    began_s = time.process_time()
    run = _Run(deployment, plan, seed, timeout_s, note, keeps_spans=keeps_spans)
    limit_s = plan.duration_s + timeout_s + _SETTLING_S
    outcome = virtual_time.run(run.main(), limit_s=limit_s)
    return outcome(time.process_time() - began_s)


class _Run:
    def __init__(
        self, deployment: Deployment, plan: Plan, seed: int, timeout_s: float, note: Note, *, keeps_spans: bool
    ) -> None:
        self._deployment = deployment
        self._plan = plan
        self._seed = seed
        self._timeout_s = timeout_s
        self._note = note
        self._keeps_spans = keeps_spans
        self._began_s = 0.0
        """When the cluster was ready: the plan's times count from then."""
        self._records: dict[int, Record] = {}
        self._timelines: dict[int, Timeline] = {}
        self._sampler = Sampler(plan.duration_s)

    async def main(self) -> Callable[[float], Outcome]:
        most = len(self._plan.requests)
        async with running(self._deployment, self._seed, requests=most, keeps_spans=self._keeps_spans) as cluster:
            loop = asyncio.get_running_loop()
            self._began_s = loop.time()
            for node in cluster.nodes.values():
                node.uses[-1].start_s = self._began_s
            interrupted = not await self._served(cluster)
            ended_s = loop.time() - self._began_s
            uses = [use for node in cluster.nodes.values() for use in node.used(loop.time())]
            spans = [span for node in cluster.nodes.values() for span in node.activity.spans]
            moved = dict(cluster.links.flows.moved)
            host_s = 0.0 if cluster.cores is None else cluster.cores.given_s
        first_s, ended = self._began_s, sorted(self._records)
        return lambda took_s: Outcome(
            rate=self._plan.rate,
            seed=self._seed,
            records=[self._records[number] for number in ended],
            timelines=[self._timelines.get(number) for number in ended],
            instances=[use.since(first_s) for use in uses],
            samples=self._sampler.samples,
            decisions=[Decision(decision.at_s - first_s, decision.text) for decision in cluster.decisions],
            moved_bytes=moved,
            ended_s=ended_s,
            took_s=took_s,
            host_s=host_s,
            spans=[span.since(first_s) for span in spans],
            interrupted=interrupted,
        )

    async def _served(self, cluster: SimCluster) -> bool:
        """Send the requests, and return once all have ended; False when Ctrl-C came first, which cancels this task."""
        try:
            async with asyncio.TaskGroup() as watching:
                watched = [
                    watching.create_task(self._sample(cluster)),
                    watching.create_task(self._let_happen(cluster)),
                ]
                async with asyncio.TaskGroup() as clients:
                    for number, planned in enumerate(self._plan.requests):
                        clients.create_task(self._client(cluster, number, planned))
                for task in watched:
                    task.cancel()
        except asyncio.CancelledError:
            if (current := asyncio.current_task()) is not None:
                current.uncancel()
            return False
        return True

    async def _client(self, cluster: SimCluster, number: int, planned: Planned) -> None:
        loop = asyncio.get_running_loop()
        due_s = self._began_s + planned.arrival_s
        hops_s = HOPS * self._deployment.control_s
        request = chat_request(number, planned, self._deployment.model.model_id, timeout_s=self._timeout_s)
        if cluster.cores is None:
            await asyncio.sleep(due_s + hops_s - loop.time())
        else:
            await asyncio.sleep(due_s - loop.time())
            await cluster.come_in(len(request.media))
            await asyncio.sleep(hops_s)
        cluster.prepare.expect(request, number, planned)
        first: asyncio.Future[float] | None = None
        """The message with the first token, as the client has it."""
        last: asyncio.Future[float] | None = None
        tokens = prompt_tokens = 0
        error = ""
        try:
            async with asyncio.timeout(self._timeout_s), aclosing(cluster.router.chat(request)) as stream:
                async for events in stream:
                    last = cluster.go_out(len(request.media), ends=isinstance(events[-1], ChatFinished))
                    for event in events:
                        if isinstance(event, TokenChunk) and first is None:
                            first = last
                        elif isinstance(event, ChatFinished):
                            tokens, prompt_tokens = event.usage.completion_tokens, event.usage.prompt_tokens
        except TimeoutError:
            error = TIMEOUT
        except TriptychError as failure:
            error = f"HTTP {failure.http_status}"
        ttft_s = None if first is None else await first + hops_s - due_s
        end_s = (loop.time() if last is None else max(loop.time(), await last)) + hops_s - due_s
        record = Record(planned, 0.0, ttft_s, end_s, prompt_tokens, tokens, error)
        cluster.prepare.forget(request)
        self._records[number] = record
        with suppress(NotFound):
            self._timelines[number] = await cluster.router.timeline(request.request_id)
        self._note(record)

    async def _sample(self, cluster: SimCluster) -> None:
        while True:
            await asyncio.sleep(self._sampler.every_s)
            self._sampler.sample(cluster.nodes.values(), cluster.now_s, cluster.now_s - self._began_s)

    async def _let_happen(self, cluster: SimCluster) -> None:
        """The faults of the scenario, those of one time in their order."""
        for fault in sorted(self._deployment.faults, key=lambda fault: fault.at_s):
            await asyncio.sleep(self._began_s + fault.at_s - cluster.now_s)
            node = cluster.nodes[fault.instance]
            match fault.what:
                case "kill" if node.is_up:
                    await cluster.kill(node)
                case "start" if not node.is_up:
                    await node.start()
                case "hang" if node.is_up:
                    node.hang()
                case "go-on" if node.is_up:
                    node.go_on()
                case _:
                    continue
            cluster.decide(f"{fault.what} {fault.instance} (fault of the scenario)")
