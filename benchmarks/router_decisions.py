"""CPU of a router's decisions for a request with one image, in a cluster of 48 encoders and 20 text instances.

Both machines of the router, driven by a loop in one process: from the prepared request to its end, one request after
the other. No gRPC, no prompts, no media, no metrics. Between two requests instances report their load: none of them, a
quarter, or each. CPU of the request's own events and of the reports before it are shown apart, as medians over a
round's requests.

With ``--before DIR``, the root of another working tree, its ``src`` is measured as well, and with ``--predicted``
routing by predicted time, with profiles: all in turn, round by round, each round in a process of its own. A ratio is
that of two such rounds, to ``before`` or else to ``now``; the median is shown, with the quartiles.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count, cycle
from pathlib import Path
from random import Random
from typing import Any

import triptych
from benchmarks import ending, machine
from benchmarks.figures import Quartiles, add_before_options, add_json_option, quartiles, shown, write_figures
from triptych.domain.embedding import DType, Ticket, payload_nbytes
from triptych.domain.encoding import EncodeResult
from triptych.domain.generation import Finished, FinishReason
from triptych.domain.instance import InstanceInfo, InstanceLoad, ModelInfo, ServedPart, StageLoad
from triptych.domain.item_plan import ItemPlan
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.membership import Member
from triptych.domain.profile import (
    DecodeRow,
    EncodeRow,
    Measured,
    Origin,
    PrefillRow,
    PrepareRow,
    Profile,
    ProfileIdentity,
    TransferRow,
)
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.machine.router.cluster import ClusterMachine
from triptych.machine.router.cluster_events import ClusterEvent, ClusterTick, InstanceSeen, LoadReported, MemberJoined
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.machine.router.request import RequestLimits, RequestMachine
from triptych.machine.router.request_events import (
    Encode,
    Generate,
    Prepared,
    RequestEffect,
    RequestEvent,
    TextReported,
)
from triptych.machine.router.shared_events import (
    CreditReturned,
    CreditsWanted,
    FirstToken,
    Granted,
    ItemEncoded,
    Release,
    TextWanted,
)
from triptych.policy.costs import Costs
from triptych.policy.policies import Policies, PolicyNames
from triptych.testing.fakes import fake_tensors

ENCODERS, TEXTS = 48, 20
NOW, BEFORE, PREDICTED = "now", "before", "predicted"
_MODEL = ModelInfo("m", "r", DType.F32, 8, 32_768)
_INFO = MediaInfo(Modality.IMAGE, "png", 56, 56, 100, bytes(32))
_IMAGE_TOKENS, _PROMPT_TOKENS, _ANSWER_TOKENS = 576, 640, 128
_TENSORS = fake_tensors(_IMAGE_TOKENS, _MODEL.hidden_size)
_DONE = Finished(FinishReason.STOP, _ANSWER_TOKENS, prefill_s=0.1, decode_s=0.1)
_ENCODER = Profile(
    ProfileIdentity(ModelPart.ENCODER, "0" * 64, frozenset({Stage.ENCODE}), "synthetic", DType.F32),
    Measured(Origin.SYNTHETIC, ""),
    encode=tuple(EncodeRow(n, items, 0.005 + 1e-4 * n * items) for n in (1, 256, 4096) for items in (1, 4, 16)),
    prepare=tuple(PrepareRow(64 * pixels, pixels, 1e-8 * pixels) for pixels in (1, 1 << 20)),
    transfer=tuple(TransferRow("tcp", nbytes, 1e-9 * nbytes) for nbytes in (1 << 16, 1 << 24)),
)
_DECODER = Profile(
    ProfileIdentity(ModelPart.DECODER, "0" * 64, frozenset({Stage.PREFILL, Stage.DECODE}), "synthetic", DType.F32),
    Measured(Origin.SYNTHETIC, ""),
    prefill=tuple(PrefillRow(n, cached, 0.01 + 1e-4 * n) for n in (1, 256, 4096) for cached in (0, 4096)),
    decode=tuple(DecodeRow(n, context, 0.01 + 1e-3 * n) for n in (1, 16, 64) for context in (1, 4096)),
)
_PARTS = {
    Role.E: (ServedPart(_ENCODER.identity, max_batch=8, prepare_cores=4),),
    Role.PD: (ServedPart(_DECODER.identity, max_batch=64, token_budget=2048),),
}
_STEP_S = 0.001
"""Time between two requests."""


@dataclass(frozen=True, slots=True)
class Settings:
    rounds: int = 9
    requests: int = 500
    """Of a round, for each number of reports."""
    reports: tuple[int, ...] = (0, (ENCODERS + TEXTS) // 4, ENCODERS + TEXTS)
    """Load reports between two requests."""


QUICK = Settings(rounds=1, requests=20)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU in us, of a request's own events and of the reports before it; the ratios are to ``before``."""

    tree: str
    reports: int
    request_us: float
    reports_us: float
    request_ratio: Quartiles | None
    """Median and quartiles."""
    total_ratio: Quartiles | None
    """Of both together."""


class Driver:
    """A cluster, and requests that go through it."""

    def __init__(self, *, predicts: bool) -> None:
        chosen, more = PolicyNames(), dict[str, Any]()
        if predicts:
            chosen = PolicyNames(encoder_routing="predicted", text_routing="predicted")
            costs = {profile.identity.part: Costs(profile) for profile in (_ENCODER, _DECODER)}
            more["costs"] = lambda identity: costs[identity.part]
        policies = Policies.named(chosen)
        self._cluster = ClusterMachine(
            ClusterLimits(), policies, Random(1), arena_retry_s=0.1, retry_after_s=1.0, **more
        )
        self._limits = RequestLimits()
        self._numbers = count(1)
        self._now_s = 0.0
        names = {f"10.0.0.{number}:50052": Role.E for number in range(ENCODERS)}
        names |= {f"10.0.1.{number}:50053": Role.PD for number in range(TEXTS)}
        for name, role in names.items():
            info = InstanceInfo(
                f"i-{name}", 1, role, _MODEL, 1 << 30, (), max_items=64, kv_tokens=1 << 20, parts=_PARTS[role]
            )
            self._cluster.handle(MemberJoined(Member(name)), 0.0)
            self._cluster.handle(InstanceSeen(name, info), 0.0)
        self._cluster.handle(ClusterTick(), 0.0)
        self._reports = cycle(_reports(names))

    def report(self) -> None:
        self._cluster.handle(next(self._reports), self._now_s)

    def request(self) -> None:
        """One request, until it is over and has returned its credits."""
        number = next(self._numbers)
        self._now_s += _STEP_S
        request = RequestMachine(
            number,
            f"request-{number}",
            _MODEL.model_id,
            now_s=self._now_s,
            deadline_s=self._now_s + 60,
            limits=self._limits,
            new_lease=lambda: bytes(16),
        )
        encode = self._to_request(request, Prepared((_plan(number),), _PROMPT_TOKENS, _ANSWER_TOKENS))
        assert isinstance(encode, Encode)
        lease = encode.reader_lease
        holder, nbytes = f"i-{encode.name}", payload_nbytes(_TENSORS)
        ticket = Ticket(bytes(32), holder, 1, 0, nbytes, 1, 0, _TENSORS, _IMAGE_TOKENS, lease, encode.lease_s)
        result = EncodeResult(ticket, encode.router_lease, cached=False, queue_s=0.0, encode_s=0.0)
        generate = self._to_both(request, ItemEncoded(encode.credit, encode.name, result))
        assert isinstance(generate, Generate)
        self._to_both(request, FirstToken(generate.credit))
        self._to_request(request, TextReported(generate.credit, _DONE))
        self._to_cluster(request, CreditReturned(generate.credit))
        assert request.phase.has_ended
        assert self._cluster.outstanding == 0

    def _to_both(self, request: RequestMachine, event: ItemEncoded | FirstToken) -> Encode | Generate | None:
        self._to_cluster(request, event)
        return self._to_request(request, event)

    def _to_request(self, request: RequestMachine, event: RequestEvent) -> Encode | Generate | None:
        """Returns the call that is to be made, if any."""
        return self._perform(request, request.handle(event, self._now_s))

    def _perform(self, request: RequestMachine, effects: list[RequestEffect]) -> Encode | Generate | None:
        call: Encode | Generate | None = None
        for effect in effects:
            if isinstance(effect, Encode | Generate):
                call = effect
            elif isinstance(effect, CreditsWanted | TextWanted):
                call = self._to_cluster(request, effect) or call
            elif isinstance(effect, Release) and effect.credit is not None:
                self._to_cluster(request, CreditReturned(effect.credit))
        return call

    def _to_cluster(self, request: RequestMachine, event: ClusterEvent) -> Encode | Generate | None:
        call: Encode | Generate | None = None
        for effect in self._cluster.handle(event, self._now_s):
            if isinstance(effect, Granted):
                call = self._to_request(request, effect)
        return call


def _plan(number: int) -> ItemPlan:
    return ItemPlan(
        item=0,
        param="messages",
        media=b"",
        info=_INFO,
        content=(number.to_bytes(32, "big"), b""),
        start=0,
        tokens=_IMAGE_TOKENS,
        tensors=_TENSORS,
        nbytes=1 << 20,
        units=(_IMAGE_TOKENS,),
    )


def _reports(names: dict[str, Role]) -> Iterator[LoadReported]:
    """Some reports of each instance, which take turns; no two in a row of one instance are equal."""
    random = Random(2)
    for turn in range(8):
        for name, role in names.items():
            stages = {
                stage: StageLoad(random.randrange(5000) * 8 + turn, random.randrange(9), random.randrange(1 << 28))
                for stage in Stage
                if stage in role.stages
            }
            yield LoadReported(name, InstanceLoad(stages))


def measure_here(settings: Settings, *, predicts: bool) -> list[tuple[float, float]]:
    """One round in this process: the medians of a request and of the reports before it, in us."""
    driver = Driver(predicts=predicts)
    found: list[tuple[float, float]] = []
    for reports in settings.reports:
        took: list[int] = []
        reported: list[int] = []
        for number in range(settings.requests + settings.requests // 4):
            began = time.process_time_ns()
            for _ in range(reports):
                driver.report()
            then = time.process_time_ns()
            driver.request()
            if number >= settings.requests // 4:  # the others warm up
                took.append(time.process_time_ns() - then)
                reported.append(then - began)
        found.append((statistics.median(took) / 1e3, statistics.median(reported) / 1e3 if reports else 0.0))
    return found


def measure_in(tree: Path, settings: Settings, *, predicts: bool) -> list[tuple[float, float]]:
    """One round in a process of its own, with the ``src`` of this working tree."""
    command = [sys.executable, "-m", "benchmarks.router_decisions", "--round", str(settings.requests)]
    command += ["--predicted"] if predicts else []
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}  # noqa: TID251 - passed to the child
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    said = json.loads(done.stdout)
    if Path(said["package"]).resolve() != (tree / "src" / "triptych").resolve():
        raise RuntimeError(f"measured {said['package']} instead of {tree}")
    return [(request_us, reports_us) for request_us, reports_us in said["found"]]


def measure(settings: Settings, before: Path | None, *, predicted: bool = False) -> dict[str, Any]:
    here = Path(__file__).parents[1]
    variants = {BEFORE: before, NOW: here, PREDICTED: here if predicted else None}
    trees = {name: tree for name, tree in variants.items() if tree is not None}
    rounds: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in trees}
    for _ in range(settings.rounds):
        for name, tree in trees.items():
            rounds[name].append(measure_in(tree, settings, predicts=name == PREDICTED))
    first = next(iter(trees))
    rows: list[Cost] = []
    for place, reports in enumerate(settings.reports):
        for name in trees:
            pairs = [medians[place] for medians in rounds[name]]
            base = [medians[place] for medians in rounds[first]] if len(trees) > 1 else []
            rows.append(
                Cost(
                    name,
                    reports,
                    statistics.median(request for request, _ in pairs),
                    statistics.median(reports_us for _, reports_us in pairs),
                    quartiles([own[0] / other[0] for own, other in zip(pairs, base, strict=bool(base))]),
                    quartiles([sum(own) / sum(other) for own, other in zip(pairs, base, strict=bool(base))]),
                )
            )
            _show(rows[-1])
    return {"machine": machine.describe(), "settings": asdict(settings), "decisions": [asdict(row) for row in rows]}


def _show(row: Cost) -> None:
    total_us = row.request_us + row.reports_us
    print(
        f"{row.tree:<9} {row.reports:>2} reports  request {row.request_us:6.1f} us{shown(row.request_ratio)}  "
        f"reports {row.reports_us:6.1f} us  together {total_us:6.1f} us{shown(row.total_ratio)}",
        flush=True,
    )


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="a few requests of each kind: shows that it works")
    add_before_options(parser, Settings().rounds)
    parser.add_argument("--predicted", action="store_true", help="routing by predicted time as well")
    parser.add_argument("--round", type=int, metavar="REQUESTS", help="one round in this process, as JSON")
    arguments = parser.parse_args()
    if arguments.round is not None:
        found = measure_here(Settings(requests=arguments.round), predicts=arguments.predicted)
        print(json.dumps({"package": str(Path(triptych.__file__).parent), "found": found}))
        return
    settings = QUICK if arguments.quick else Settings(rounds=arguments.rounds)
    result = measure(settings, arguments.before, predicted=arguments.predicted)
    write_figures(arguments.json, result)


if __name__ == "__main__":
    main()
