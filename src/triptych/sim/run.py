"""One run of a deployment under a plan: the real services in virtual time, from the first request to the last answer."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress

from triptych.domain.generation import ChatFinished, TokenChunk
from triptych.domain.stage import ModelPart, Stage
from triptych.domain.timeline import Timeline
from triptych.errors import NotFound, TriptychError
from triptych.virtual import virtual_time
from triptych.workload.report import TIMEOUT, Record
from triptych.workload.requests import Plan, Planned

from .cluster import SimCluster, running
from .outcome import Busy, Decision, Outcome, Sample
from .prepare import chat_request
from .scenario import Deployment

_SAMPLES = 200
"""Samples of a run, taken at equal intervals of its duration, and on until its end."""
_SHORTEST_S = 0.1
"""Shortest interval between two."""
_WORK: Mapping[ModelPart, tuple[Busy, ...]] = {
    ModelPart.ENCODER: ("prepare", "encode"),
    ModelPart.DECODER: ("step", "copy", "beside", "pull"),
}
_HOPS = 2
"""Messages before the router has a request, and before a caller has a token: from the client to the gateway, and on."""
_SETTLING_S = 3600.0
"""How long a run may go on after its last request came, beside the requests' time limit."""

Note = Callable[[Record], None]


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

    The same arguments give the same outcome, but for ``took_s``. Raises CannotStart for a deployment that no instance could start with.
    """
    began_s = time.process_time()
    run = _Run(deployment, plan, seed, timeout_s, note, keeps_spans=keeps_spans)
    limit_s = plan.duration_s + timeout_s + _SETTLING_S
    outcome = virtual_time.run(run.main(), seed=seed, limit_s=limit_s)
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
        self._samples: list[Sample] = []

    async def main(self) -> Callable[[float], Outcome]:
        requests = self._plan.requests
        cluster_running = running(self._deployment, self._seed, requests=len(requests), keeps_spans=self._keeps_spans)
        async with cluster_running as cluster:
            loop = asyncio.get_running_loop()
            self._began_s = loop.time()
            for node in cluster.nodes.values():
                node.uses[-1].start_s = self._began_s
            async with asyncio.TaskGroup() as watching:
                watched = [
                    watching.create_task(self._sample(cluster)),
                    watching.create_task(self._let_happen(cluster)),
                ]
                async with asyncio.TaskGroup() as clients:
                    for number, planned in enumerate(requests):
                        clients.create_task(self._client(cluster, number, planned))
                for task in watched:
                    task.cancel()
            ended_s = loop.time() - self._began_s
            uses = [use for node in cluster.nodes.values() for use in node.used(loop.time())]
            spans = [span for node in cluster.nodes.values() for span in node.activity.spans]
            moved = dict(cluster.links.moved)
            host_s = 0.0 if cluster.cores is None else cluster.cores.given_s
        first_s = self._began_s
        return lambda took_s: Outcome(
            rate=self._plan.rate,
            seed=self._seed,
            records=[self._records[number] for number in range(len(requests))],
            timelines=[self._timelines.get(number) for number in range(len(requests))],
            instances=[use.since(first_s) for use in uses],
            samples=self._samples,
            decisions=[Decision(decision.at_s - first_s, decision.text) for decision in cluster.decisions],
            moved_bytes=moved,
            ended_s=ended_s,
            took_s=took_s,
            host_s=host_s,
            spans=[span.since(first_s) for span in spans],
        )

    async def _client(self, cluster: SimCluster, number: int, planned: Planned) -> None:
        loop = asyncio.get_running_loop()
        due_s = self._began_s + planned.arrival_s
        hops_s = _HOPS * self._deployment.control_s
        await asyncio.sleep(due_s - loop.time())
        request = chat_request(number, planned, self._deployment.model.model_id, timeout_s=self._timeout_s)
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
        every_s = max(self._plan.duration_s / _SAMPLES, _SHORTEST_S)
        before: dict[str, dict[Busy, float]] = {}
        while True:
            await asyncio.sleep(every_s)
            now = {name: node.activity.until(cluster.now_s) for name, node in cluster.nodes.items()}
            self._samples.append(_sampled(cluster, cluster.now_s - self._began_s, every_s, before, now))
            before = now

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


def _sampled(
    cluster: SimCluster,
    at_s: float,
    every_s: float,
    before: Mapping[str, Mapping[Busy, float]],
    now: Mapping[str, Mapping[Busy, float]],
) -> Sample:
    sizes: dict[str, int] = {}
    pending: dict[str, int] = {}
    busy: dict[Busy, list[float]] = {}
    for name, node in cluster.nodes.items():
        if not node.is_up:
            continue
        stages = node.service.load().stages
        serving = "".join(stage.value[0].upper() for stage in Stage if stage in stages)
        sizes[serving or node.role.value] = sizes.get(serving or node.role.value, 0) + 1
        for stage, load in stages.items():
            pending[stage.value] = pending.get(stage.value, 0) + load.pending
        for part in node.kind.profiles:
            for work in _WORK[part]:
                if work == "beside" and cluster.cores is None:
                    continue
                workers = node.kind.prepare_cores if work == "prepare" else 1
                spent_s = now[name].get(work, 0.0) - before.get(name, {}).get(work, 0.0)
                busy.setdefault(work, []).append(spent_s / every_s / workers)
    return Sample(at_s, sizes, pending, {work: sum(shares) / len(shares) for work, shares in busy.items()})
