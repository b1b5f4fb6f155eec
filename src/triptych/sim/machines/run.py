"""One run of a deployment under a plan by its machines, from the first request to the last answer."""

from triptych.errors import TriptychError
from triptych.workload.report import TIMEOUT, Record
from triptych.workload.requests import Plan, Planned

from ..event_run import carry_out  # noqa: TID252 - of the simulator
from ..limits import check  # noqa: TID252
from ..outcome import Outcome  # noqa: TID252
from ..run import HOPS, Note  # noqa: TID252
from ..samples import Sampler  # noqa: TID252
from ..scenario import Deployment  # noqa: TID252
from .cluster import MachineCluster

_POLL_S = 0.01
"""The services are asked so often whether all instances have been seen."""


def simulate(
    deployment: Deployment,
    plan: Plan,
    *,
    seed: int = 0,
    timeout_s: float = 300.0,
    keeps_spans: bool = False,
    note: Note = lambda _: None,
) -> Outcome:
    """As ``sim.run.simulate``, with the same arguments. Raises NotSimulated for what the driver cannot do."""
    check("machines", deployment, plan.requests)
    return carry_out(lambda: _Run(deployment, plan, seed, timeout_s, note, keeps_spans=keeps_spans))


class _Run:
    def __init__(
        self, deployment: Deployment, plan: Plan, seed: int, timeout_s: float, note: Note, *, keeps_spans: bool
    ) -> None:
        self.cluster = MachineCluster(deployment, seed, keeps_spans=keeps_spans)
        self._plan = plan
        self._seed = seed
        self._timeout_s = timeout_s
        self._note = note
        self._records: dict[int, Record] = {}
        self._sampler = Sampler(plan.duration_s)
        self._hops_s = HOPS * deployment.control_s
        began_s, seen_s = _POLL_S, self.cluster.router.ready_after_s
        while began_s <= seen_s:  # it is asked first where both come at one time
            began_s += _POLL_S
        self._began_s = began_s
        self._ended_s = began_s
        self._is_interrupted = False
        agenda = self.agenda = self.cluster.agenda
        if plan.requests:
            agenda.at(self._due_s(0) + self._hops_s, self._send, 0)
            agenda.at(began_s + self._sampler.every_s, self._sample)
        else:
            agenda.stop()

    def _due_s(self, number: int) -> float:
        return self._began_s + self._plan.requests[number].arrival_s

    def _send(self, number: int) -> None:
        requests, agenda = self._plan.requests, self.agenda
        if number + 1 < len(requests):
            agenda.at(self._due_s(number + 1) + self._hops_s, self._send, number + 1)
        planned = requests[number]
        client = _Client(self, number, planned, self._due_s(number))
        try:
            self.cluster.router.admit(number, planned, client, timeout_s=self._timeout_s)
        except TriptychError as error:
            client.ended(error)

    def _sample(self) -> None:
        agenda = self.agenda
        self._sampler.sample(self.cluster.nodes.values(), agenda.now_s, agenda.now_s - self._began_s)
        agenda.after(self._sampler.every_s, self._sample)

    def is_over(self, number: int, record: Record) -> None:
        """A client has all that it gets."""
        self._records[number] = record
        self._note(record)
        if len(self._records) == len(self._plan.requests):
            self._ended_s = self.agenda.now_s
            self.agenda.soon(self.agenda.soon, self.agenda.soon, self.agenda.stop)

    def interrupt(self) -> None:
        """The outcome has what has ended."""
        self._is_interrupted = True
        self._ended_s = max(self._began_s, self.agenda.now_s)

    def outcome(self, took_s: float) -> Outcome:
        cluster, ended = self.cluster, sorted(self._records)
        first_s = self._began_s
        return Outcome(
            rate=self._plan.rate,
            seed=self._seed,
            records=[self._records[number] for number in ended],
            timelines=[cluster.router.timeline(number) for number in ended],
            instances=[node.used(first_s, self._ended_s).since(first_s) for node in cluster.nodes.values()],
            samples=self._sampler.samples,
            decisions=(),
            moved_bytes=dict(cluster.links.flows.moved),
            ended_s=self._ended_s - first_s,
            took_s=took_s,
            spans=[span.since(first_s) for node in cluster.nodes.values() for span in node.activity.spans],
            interrupted=self._is_interrupted,
        )


class _Client:
    """The sender of one request."""

    def __init__(self, run: _Run, number: int, planned: Planned, due_s: float) -> None:
        self._run = run
        self._number = number
        self._planned = planned
        self._due_s = due_s
        self._ttft_s: float | None = None
        self._is_over = False

    def token(self) -> None:
        if self._ttft_s is None:
            self._ttft_s = self._since_s()

    def ended(self, error: TriptychError | None) -> None:
        self._end("" if error is None else f"HTTP {error.http_status}")

    def timed_out(self) -> None:
        self._end(TIMEOUT)

    def _since_s(self) -> float:
        """Since it was due until what the router has now is here."""
        run = self._run
        return run.cluster.agenda.now_s + run._hops_s - self._due_s  # noqa: SLF001 - a part of it

    def _end(self, error: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        planned, run = self._planned, self._run
        prompt_tokens = tokens = 0
        if not error:
            prompt_tokens, tokens = run.cluster.router.prompt_tokens(planned), planned.output_tokens
        run.is_over(self._number, Record(planned, 0.0, self._ttft_s, self._since_s(), prompt_tokens, tokens, error))
