"""One run of a deployment under a plan by queues, from the first request to the last answer."""

from triptych.domain.timeline import Outcome as Ending
from triptych.domain.timeline import Timeline
from triptych.errors import TriptychError
from triptych.workload.report import Record
from triptych.workload.requests import Plan

from ..event_run import carry_out  # noqa: TID252 - of the simulator
from ..limits import check  # noqa: TID252
from ..outcome import Outcome  # noqa: TID252
from ..run import HOPS, Note  # noqa: TID252
from ..samples import Sampler  # noqa: TID252
from ..scenario import Deployment  # noqa: TID252
from .cluster import QueueCluster
from .request import Request


def simulate(
    deployment: Deployment,
    plan: Plan,
    *,
    seed: int = 0,
    timeout_s: float = 300.0,
    keeps_spans: bool = False,
    note: Note = lambda _: None,
) -> Outcome:
    """As ``sim.run.simulate``, with the same arguments, and about the same outcome. Timelines have the times of stages alone.

    Raises NotSimulated for what queues do not have.
    """
    check("queues", deployment, plan.requests)
    return carry_out(lambda: _Run(deployment, plan, seed, timeout_s, note, keeps_spans=keeps_spans))


class _Run:
    def __init__(
        self, deployment: Deployment, plan: Plan, seed: int, timeout_s: float, note: Note, *, keeps_spans: bool
    ) -> None:
        self.cluster = QueueCluster(deployment, seed, self._on_end, keeps_spans=keeps_spans)
        self._plan = plan
        self._seed = seed
        self._timeout_s = timeout_s
        self._note = note
        self._hops_s = HOPS * deployment.control_s
        self._model_id = deployment.model.model_id
        self._records: dict[int, tuple[Record, Timeline | None]] = {}
        self._sampler = Sampler(plan.duration_s)
        self._ended_s = 0.0
        self._is_interrupted = False
        agenda = self.agenda = self.cluster.agenda
        if plan.requests:
            agenda.at(plan.requests[0].arrival_s + self._hops_s, self._send, 0)
            agenda.at(self._sampler.every_s, self._sample)
        else:
            agenda.stop()

    def _send(self, number: int) -> None:
        requests, agenda = self._plan.requests, self.agenda
        if number + 1 < len(requests):
            agenda.at(requests[number + 1].arrival_s + self._hops_s, self._send, number + 1)
        request = Request(number, requests[number])
        try:
            self.cluster.router.admit(request, self._timeout_s)
        except TriptychError as error:
            self._on_end(request, f"HTTP {error.http_status}", agenda.now_s)

    def _sample(self) -> None:
        agenda = self.agenda
        self._sampler.sample(self.cluster.instances.values(), agenda.now_s, agenda.now_s)
        agenda.after(self._sampler.every_s, self._sample)

    def _on_end(self, request: Request, error: str, at_s: float) -> None:
        """A client has all that it gets, once what the router has at this time is there."""
        planned, back_s = request.planned, self._hops_s - request.planned.arrival_s
        prompt_tokens, tokens = (0, 0) if error else (request.prompt_tokens, planned.output_tokens)
        ttft_s = request.first_s + back_s if request.first_s else None
        record = Record(planned, 0.0, ttft_s, at_s + back_s, prompt_tokens, tokens, error)
        self._records[request.number] = record, self._timeline(request, error, at_s) if request.prompt_tokens else None
        self._note(record)
        self._ended_s = max(self._ended_s, at_s)
        if len(self._records) == len(self._plan.requests):
            self.agenda.stop()

    def _timeline(self, request: Request, error: str, at_s: float) -> Timeline:
        ttft_s = request.first_s - request.prepared_s if request.first_s else 0.0
        return Timeline(
            f"request-{request.number}",
            self._model_id,
            Ending.FAILED if error else Ending.DONE,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=0 if error else request.planned.output_tokens,
            encode_s=max(0.0, request.encoded_s - request.prepared_s),
            queue_s=request.queue_s,
            pull_s=request.pull_s,
            prefill_s=request.prefill_s,
            ttft_s=ttft_s,
            total_s=at_s - request.prepared_s,
            error=error,
        )

    def interrupt(self) -> None:
        """The outcome has what has ended."""
        self._is_interrupted = True
        self._ended_s = self.agenda.now_s

    def outcome(self, took_s: float) -> Outcome:
        cluster, ended = self.cluster, sorted(self._records)
        instances = cluster.instances.values()
        return Outcome(
            rate=self._plan.rate,
            seed=self._seed,
            records=[self._records[number][0] for number in ended],
            timelines=[self._records[number][1] for number in ended],
            instances=[instance.used(self._ended_s) for instance in instances],
            samples=self._sampler.samples,
            decisions=(),
            moved_bytes=dict(cluster.transfers.moved),
            ended_s=self._ended_s,
            took_s=took_s,
            spans=[span for instance in instances for span in instance.activity.spans],
            interrupted=self._is_interrupted,
        )
