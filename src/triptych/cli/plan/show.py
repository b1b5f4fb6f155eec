"""A plan on the terminal."""

from rich.console import Console
from rich.table import Table

from triptych.runtime.plans import Candidate, Infeasible, PlanRecord
from triptych.workload.report import Latency

_MOST_REJECTED = 6
_WINS = {
    "cheapest": "the cheapest that meets the objectives",
    "goodput": "the highest goodput",
    "ttft": "the shortest time to the first token",
}


def show(plan: PlanRecord, console: Console) -> None:
    """Candidates, the chosen one in full, and why the others are not."""
    for source in plan.made.sources:
        console.print(source, soft_wrap=True, style="dim")
    if plan.candidates:
        console.print(_ranking(plan))
        for win, number in plan.winners.items():
            console.print(f"{_WINS[win]}: {number + 1}", soft_wrap=True)
        console.print(f"Pareto front (price, goodput, TTFT): {', '.join(str(number + 1) for number in plan.front)}")
    if plan.chosen is not None:
        _show_chosen(plan, plan.chosen, console)
    for number, candidate in enumerate(plan.candidates[1:], start=2):
        console.print(f"{number} is not it: {candidate.lacks}", soft_wrap=True)
    for rejected in plan.rejected[:_MOST_REJECTED]:
        console.print(f"given up: {rejected.placement}: {rejected.reason}", soft_wrap=True, style="dim")
    if (more := len(plan.rejected) - _MOST_REJECTED) > 0:
        console.print(f"and {more} more", style="dim")
    if plan.infeasible is not None:
        _show_infeasible(plan.infeasible, console)
    made = plan.made
    interrupted = "interrupted: this is the best so far; " if made.interrupted else ""
    console.print(
        f"{interrupted}{made.points} placements judged, {made.simulated} simulated in {made.took_s:.0f} s", style="dim"
    )


def _ranking(plan: PlanRecord) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("", justify="right")
    table.add_column("placement")
    for name in ("TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99", "in time", "goodput", "$/h", "busiest"):
        table.add_column(name, justify="left" if name == "busiest" else "right", no_wrap=True)
    for number, candidate in enumerate(plan.candidates, start=1):
        predicted = candidate.predicted
        prices, goodput = predicted.prices, predicted.goodput
        note = f" ({candidate.note})" if candidate.note else ""
        table.add_row(
            str(number),
            f"{candidate.placement}{note}",
            *_latencies(predicted.figures.all.ttft),
            *_latencies(predicted.figures.all.tpot),
            _percent(predicted.figures.all.attainment),
            "-" if goodput is None else f"{'≥' if goodput.is_bound else ''}{goodput.rps:.3g}/s",
            "-" if prices is None else f"{prices.usd_per_hour:.2f}",
            predicted.binds,
        )
    return table


def _show_chosen(plan: PlanRecord, chosen: Candidate, console: Console) -> None:
    placement, predicted = chosen.placement, chosen.predicted
    console.print(f"\nchosen: {placement}", soft_wrap=True, style="bold")
    console.print(" ".join((*placement.cluster_options, *placement.hardware_options)), soft_wrap=True)
    for line in plan.why:
        console.print(f"why: {line}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    names = ("kind", "requests", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99", "in time")
    for name in names:
        table.add_column(name, justify="left" if name == "kind" else "right")
    kinds = predicted.figures.by_kind
    for kind, figures in {"all": predicted.figures.all, **(kinds if len(kinds) > 1 else {})}.items():
        table.add_row(
            kind,
            str(figures.requests),
            *_latencies(figures.ttft),
            *_latencies(figures.tpot),
            _percent(figures.attainment),
        )
    console.print(table)
    busy = ", ".join(f"{stage} {share:.0%}" for stage, share in predicted.utilization.items())
    console.print(f"used at {plan.budget.rate:.3g} requests/s, in full batches: {busy}", soft_wrap=True)
    if (goodput := predicted.goodput) is not None:
        console.print(f"goodput by seed: {goodput.least_rps:.3g} to {goodput.most_rps:.3g} requests/s")
    if predicted.headroom:
        shares = ", ".join(f"{share:.0%} at {load} load" for load, share in predicted.headroom.items())
        console.print(f"in time: {shares}", soft_wrap=True)
    if (prices := predicted.prices) is not None:
        console.print(
            f"${prices.usd_per_hour:.2f} per hour, ${prices.usd_per_thousand_requests:.2f} per thousand requests, "
            f"${prices.usd_per_million_tokens:.2f} per million tokens",
            soft_wrap=True,
        )
    for shadow in plan.shadow_prices:
        price = "" if shadow.usd_per_hour is None else f" for ${shadow.usd_per_hour:.2f} per hour"
        console.print(
            f"one more {shadow.device} (as {shadow.role.value}): {shadow.goodput_rps:+.2g} requests/s{price}",
            soft_wrap=True,
        )
    error = "not known" if plan.made.expected_error is None else f"{plan.made.expected_error:.0%}"
    console.print(f"expected error of times: {error} ({plan.made.error_source})", soft_wrap=True)
    console.print(
        f"simulated by {predicted.fidelity}, {predicted.seeds} seeds; to look closer: {plan.simulate_line(placement)}",
        soft_wrap=True,
        style="dim",
    )


def _show_infeasible(infeasible: Infeasible, console: Console) -> None:
    console.print("\nno placement meets the objectives", style="bold")
    for reason in infeasible.reasons:
        console.print(reason, soft_wrap=True)
    if infeasible.relaxed is not None:
        console.print(f"within the budget, the best one reaches {infeasible.relaxed}", soft_wrap=True)
    if infeasible.larger is not None:
        dollars = infeasible.larger_usd_per_hour
        price = "" if dollars is None else f" for ${dollars:.2f} per hour"
        console.print(f"with more devices: {infeasible.larger}{price}, by the closed form", soft_wrap=True)


def _latencies(latency: Latency) -> tuple[str, ...]:
    return tuple(_ms(value) for value in (latency.p50_s, latency.p90_s, latency.p99_s))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
