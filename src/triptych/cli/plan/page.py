"""A plan as a page with charts, which needs no network."""

from collections.abc import Iterator
from html import escape
from typing import Any

from triptych.runtime.plans import Candidate, PlanRecord, words
from triptych.sim.html import document, figure, table
from triptych.workload.report import Latency


def page(plan: PlanRecord) -> str:
    """The whole document. Raises ImportError without matplotlib."""
    return document(f"Plan for {plan.model_id}", _parts(plan))


def _parts(plan: PlanRecord) -> Iterator[str]:
    yield f"<h1>{escape(f'Plan for {plan.model_id}')}</h1>"
    notes = [f"{plan.attainment:.0%} of the requests are to get {plan.objectives}", *plan.made.sources]
    if plan.made.interrupted:
        notes.append("interrupted: this is the best so far")
    yield from (f'<p class="note">{escape(note)}</p>' for note in notes)
    if plan.chosen is not None:
        yield f"<h2>{escape(f'Chosen: {plan.chosen.placement}')}</h2>"
        yield from (f"<p>{escape(line)}</p>" for line in plan.why)
        yield f"<p><code>{escape(plan.simulate_line(plan.chosen.placement))}</code></p>"
        yield from _in_full(plan, plan.chosen)
    if plan.infeasible is not None:
        yield "<h2>No placement meets the objectives</h2>"
        yield from (f"<p>{escape(reason)}</p>" for reason in plan.infeasible.reasons)
    if plan.candidates:
        yield "<h2>Candidates</h2>"
        yield _candidates(plan)
        yield figure(_front, plan)
        yield figure(_busy, plan)
        yield table(
            ("candidate", "what it lacks"),
            [(f"{number}: {each.placement}", each.lacks) for number, each in enumerate(plan.candidates[1:], start=2)],
        )
    if plan.rejected:
        yield "<h2>Given up</h2>"
        yield table(("placement", "reason"), [(str(each.placement), each.reason) for each in plan.rejected])
    yield "<h2>Workload and settings</h2>"
    yield table(("option", ""), [(word, "") for word in (*words(plan.workload), *words(plan.common))])


def _candidates(plan: PlanRecord) -> str:
    header = (
        "placement", "TTFT P50", "P90", "P99", "TPOT P50", "P90", "P99", "in time", "goodput", "$/h", "$/1M tokens",
        "$/1k requests", "busiest",
    )  # fmt: skip
    rows = []
    for number, each in enumerate(plan.candidates, start=1):
        predicted = each.predicted
        prices, goodput = predicted.prices, predicted.goodput
        dollars = (
            ("-", "-", "-")
            if prices is None
            else tuple(
                f"{value:.2f}"
                for value in (prices.usd_per_hour, prices.usd_per_million_tokens, prices.usd_per_thousand_requests)
            )
        )
        note = f" ({each.note})" if each.note else ""
        rows.append(
            (
                f"{number}: {each.placement}{note}",
                *_latencies(predicted.figures.all.ttft),
                *_latencies(predicted.figures.all.tpot),
                _percent(predicted.figures.all.attainment),
                "-" if goodput is None else f"{goodput.rps:.3g}/s",
                *dollars,
                predicted.binds,
            )
        )
    return table(header, rows)


def _in_full(plan: PlanRecord, chosen: Candidate) -> Iterator[str]:
    predicted = chosen.predicted
    rows = [
        (kind, str(each.requests), *_latencies(each.ttft), *_latencies(each.tpot), _percent(each.attainment))
        for kind, each in {"all": predicted.figures.all, **predicted.figures.by_kind}.items()
    ]
    yield table(("kind", "requests", "TTFT P50", "P90", "P99", "TPOT P50", "P90", "P99", "in time"), rows)
    yield table(("load", "in time"), [(load, _percent(share)) for load, share in predicted.headroom.items()])
    more = [(each.device, f"as {each.role.value}: {each.goodput_rps:+.2g} requests/s") for each in plan.shadow_prices]
    yield table(("one more", "brings"), more)


def _front(axes_of: Any, plan: PlanRecord) -> None:
    """Price and goodput of the candidates, by their numbers; the Pareto front has filled marks."""
    axis = axes_of.subplots()
    for number, each in enumerate(plan.candidates):
        prices, goodput = each.predicted.prices, each.predicted.goodput
        price = sum(each.placement.device_counts.values()) if prices is None else prices.usd_per_hour
        rps = 0.0 if goodput is None else goodput.rps
        axis.plot(price, rps, "o", color="tab:blue", fillstyle="full" if number in plan.front else "none")
        axis.annotate(str(number + 1), (price, rps), textcoords="offset points", xytext=(6, 4))
    priced = all(each.predicted.prices is not None for each in plan.candidates)
    axis.set(xlabel="$/h" if priced else "devices", ylabel="goodput, requests/s")


def _busy(axes_of: Any, plan: PlanRecord) -> None:
    axis = axes_of.subplots()
    stages = list(dict.fromkeys(stage for each in plan.candidates for stage in each.predicted.utilization))
    width = 0.8 / max(1, len(stages))
    for at, stage in enumerate(stages):
        shares = [each.predicted.utilization.get(stage, 0.0) for each in plan.candidates]
        axis.bar([number + 1 + at * width for number in range(len(shares))], shares, width, label=stage)
    axis.set(xlabel="candidate", ylabel="used, in full batches", ylim=(0, 1.05))
    axis.legend(ncols=max(1, len(stages)), frameon=False)


def _latencies(latency: Latency) -> tuple[str, ...]:
    return tuple(
        "-" if value is None else f"{1000 * value:,.0f} ms" for value in (latency.p50_s, latency.p90_s, latency.p99_s)
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
