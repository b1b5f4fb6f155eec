import math
import tomllib
from pathlib import Path

import pytest

from benchmarks.fidelity import Prompts, Settings, requests_of
from benchmarks.fidelity_calibration import ANSWER, TOGETHER, Calibration, Item, Slowed, Taken
from benchmarks.fidelity_report import (
    AGAIN,
    ALL,
    BOTH,
    Cell,
    ClassFigures,
    Figures,
    Goodput,
    Result,
    choices,
    document,
    errors,
    goodputs,
    highest_rate,
    orders,
)
from tests.benchmarks.quick import figures_of
from triptych.cli.model import Model
from triptych.domain.stage import ModelPart
from triptych.engine.delay import synthetic_decoder_profile, synthetic_encoder_profile
from triptych.sim.host import Cost, Host
from triptych.workload.report import Objectives, Record
from triptych.workload.requests import Planned, Size

IMAGE = Size(224, 224)
RATES = {0.3: 3.0, 0.6: 6.0, 0.9: 9.0}


def ran(ttft_s: float, tpot_s: float, *, requests: int = 200, attainment: float = 1.0) -> Figures:
    """A run whose requests are all alike."""
    figures = ClassFigures(
        requests, dict.fromkeys(("p50", "p90", "p99"), ttft_s), dict.fromkeys(("p50", "p90", "p99"), tpot_s)
    )
    return Figures(0, {ALL: figures}, {BOTH: attainment})


def result(
    measured: Figures, predicted: Figures, placement: str = "E+PD", share: float = 0.6, round_: int = 0
) -> Result:
    return Result(
        Cell("demo", placement, "mixed", share), round_, RATES[share], measured, predicted, {}, (1.0, 1.0), 0.0
    )


def test_an_error_is_signed_and_held_against_its_aim() -> None:
    found = {error.figure: error for error in errors([result(ran(0.100, 0.010), ran(0.112, 0.0095))])}
    assert found["ttft p50"].error == pytest.approx(0.12)
    assert found["tpot p50"].error == pytest.approx(-0.05)
    assert [found[name].within_aim for name in ("ttft p50", "ttft p99", "tpot p90")] == [False, True, True]


def test_a_p99_of_few_requests_is_not_judged() -> None:
    found = errors([result(ran(0.1, 0.01, requests=199), ran(0.1, 0.01))])
    assert {error.figure: error.judged for error in found} == {
        f"{metric} {quantile}": quantile != "p99" for metric in ("ttft", "tpot") for quantile in ("p50", "p90", "p99")
    }


def test_errors_are_of_medians_over_rounds_without_the_repetition() -> None:
    results = [
        result(ran(ttft_s, 0.01), ran(0.1, 0.01), round_=round_)
        for round_, ttft_s in ((0, 0.1), (1, 0.2), (2, 0.3), (AGAIN, 9.0))
    ]
    [error] = [error for error in errors(results) if error.figure == "ttft p50"]
    assert (error.measured, error.predicted) == pytest.approx((0.2, 0.1))
    assert document(results)["drifts"][0]["ttft p50"] == pytest.approx(89.0)


def test_only_placements_that_differ_enough_are_in_an_order() -> None:
    results = [
        result(ran(0.100, 0.010), ran(0.100, 0.010), "E+PD"),
        result(ran(0.105, 0.020), ran(0.200, 0.009), "EPD"),
    ]
    [order] = [order for order in orders(errors(results)) if order.figure == "tpot p50"]
    assert (order.better, order.worse, order.right) == ("E+PD", "EPD", False)
    assert (order.measured, order.predicted) == pytest.approx((2.0, 0.9))
    assert not [order for order in orders(errors(results)) if order.figure.startswith("ttft")]


def test_goodput_is_where_attainment_falls_below_nine_tenths() -> None:
    assert highest_rate([(3.0, 1.0), (6.0, 0.8)]) == pytest.approx(4.5)
    assert highest_rate([(3.0, 1.0), (6.0, 0.95)]) == 6.0
    assert highest_rate([(3.0, 0.0)]) == pytest.approx(0.3)
    results = [
        result(ran(0.1, 0.01, attainment=measured), ran(0.1, 0.01, attainment=predicted), share=share)
        for share, measured, predicted in ((0.3, 1.0, 1.0), (0.6, 1.0, 0.95), (0.9, 0.8, 0.7))
    ]
    [found] = goodputs(results)
    assert (found.measured, found.predicted) == pytest.approx((7.5, 6.6))
    assert found.error == pytest.approx(-0.12)


def test_figures_are_of_each_class_and_count_what_failed() -> None:
    records = [
        Record(Planned(0.0, 8, (IMAGE,) * images, 3), 0.0, 0.1 * (1 + images), 0.3 * (1 + images), 20, 3)
        for images in (0, 1)
        for _ in range(4)
    ]
    figures = Figures.of(
        [*records, Record(Planned(0.0, 8, (), 3), error="HTTP 429")],
        {"tight": Objectives(0.15, 1.0), "loose": Objectives(1.0, 1.0)},
    )
    assert {name: found.requests for name, found in figures.classes.items()} == {ALL: 8, "text": 4, "image": 4}
    assert figures.classes["image"].ttft_s["p50"] == pytest.approx(0.2)
    assert figures.failed == 1
    assert figures.attainments == pytest.approx({"tight": 4 / 9, "loose": 8 / 9})


@pytest.mark.parametrize(
    ("predicted", "chosen", "lacks"),
    [
        ({"E+PD": 9.0, "EPD": 5.0, "E+P+D": 7.0}, "E+PD", 0.0),
        ({"E+PD": 9.0, "EPD": 5.0, "E+P+D": 9.5}, "E+P+D", 0.04),
        ({"E+PD": 9.0, "EPD": 8.6, "E+P+D": 7.0}, "EPD", 0.5),
    ],
)
def test_the_chosen_placement_is_held_against_the_measured_best(
    predicted: dict[str, float], chosen: str, lacks: float
) -> None:
    """The whole model on each instance is chosen where it is less than 5 % from the best one, as a plan does."""
    measured = {"E+PD": 10.0, "EPD": 5.0, "E+P+D": 9.6}
    [choice] = choices(
        [Goodput("demo", name, "mixed", BOTH, measured[name], predicted[name], 12.0) for name in predicted]
    )
    assert (choice.chosen, choice.best) == (chosen, "E+PD")
    assert choice.lacks == pytest.approx(lacks)
    assert choice.right == (lacks <= 0.05)
    assert not choices([Goodput("demo", name, "mixed", BOTH, 0.0, predicted[name], 12.0) for name in predicted])


def test_all_placements_get_the_same_requests() -> None:
    monolith, apart = (requests_of(Settings(), Cell("demo", name, "mixed", 0.6), 5.0, 0) for name in ("EPD", "E+PD"))
    assert monolith == apart
    assert monolith != requests_of(Settings(), Cell("demo", "EPD", "mixed", 0.6), 5.0, 1)


def test_prompts_have_the_tokens_of_the_texts_that_are_sent() -> None:
    path = Model.named("demo").path
    planned = [Planned(0.0, words, (), 1) for words in (3, 30)]
    prompts = Prompts.of(path, [Record(request, prompt_tokens=0) for request in planned[:1]], "seed")
    exact = Prompts(prompts.tokenizer, 5).planned(planned, "seed")
    again = Prompts(prompts.tokenizer, 7).planned(planned, "seed")
    assert [request.text_tokens + 2 for request in exact] == [request.text_tokens for request in again]
    assert exact[1].text_tokens > exact[0].text_tokens + 20


@pytest.mark.parametrize("joined", [2, TOGETHER])
def test_what_a_calibration_measured_is_divided_among_requests_messages_and_steps(joined: int) -> None:
    """Made of known costs, and with nothing for what comes together but the first: these costs come out again, however many
    requests ``joined`` in a step.
    """
    prefill_s, decode_s, step_s, sequence_s, request_s, message_s = 0.003, 0.002, 0.0015, 0.0003, 0.004, 0.0002
    export_s, import_s, switch_s, waited = 0.003, 0.002, 0.001, 0.6
    decoder = synthetic_decoder_profile(step_s=decode_s, sequence_s=0.0, prefill_token_s=0.0001, load_s=0.0)
    encoder = synthetic_encoder_profile(pass_s=0.002, token_s=0.0, prepare_s=0.001, load_s=0.0)

    def taken(kind: str, tokens: int, together: int) -> Taken:
        size = 1 if together == 1 else joined
        front_s = (request_s + tokens * message_s) / together
        passes_s = (decode_s + 0.0001 * 10 * size + (tokens - 1) * decode_s) / size
        text_s = passes_s + tokens * (step_s / size + sequence_s) + request_s / together
        front = dict.fromkeys(("client", "gateway", "router"), front_s)
        cpu_s = front | {"text": text_s, "encoder": 0.0, "prefill": 0.0, "decode": 0.0, "others": 0.0}
        passes, tpot_s = {"text": tokens / size, "encoder": 1 / size, "decode": 2 / size}, 0.0
        if kind == "transfer":
            cpu_s["router"] = (request_s + 2 * message_s + switch_s) / together
            cpu_s["prefill"] += export_s / together
            cpu_s["decode"] += (decode_s + step_s) / size + sequence_s + (request_s + import_s) / together
            tpot_s = decode_s + step_s + sequence_s + request_s + 0.0004 + waited * (export_s + import_s)
        ttft_s = 3 * (request_s + message_s) + prefill_s + step_s + sequence_s + request_s + 0.0006
        return Taken(kind, 10, 10.0, tokens, cpu_s, ttft_s, tpot_s, {"encode": 0.0, "pull": 0.0}, 0.0, passes)

    measured = {
        f"{kind}{'s' * (together > 1)}": taken(kind, tokens, together)
        for kind, tokens in (("text", 1), ("answer", ANSWER), ("image", 1), ("first", 1), ("transfer", 2))
        for together in (1, TOGETHER)
    }
    profiles = {ModelPart.DECODER: decoder, ModelPart.ENCODER: encoder}
    slowed = {"encoder": Slowed(0.02, 0.025), "prefill": Slowed(0.04, 0.04), "decode": Slowed(0.009, 0.01)}
    slowed["text"] = Slowed(0.008, 0.01)
    host = Calibration({"client": 0.05}, measured, slowed).host(profiles, Item(16, 1000, 10_000), 2)
    assert host.cores == pytest.approx(1.95)
    assert host.pass_speed == pytest.approx(0.9), "the mean of items and prompts beside decodes"
    assert (host.decode_speed, host.decodes_speed) == pytest.approx((0.9, 0.8)), "beside passes, and beside decodes"
    assert host.router.message.alone_s == pytest.approx(message_s)
    assert host.router.message.together_s == pytest.approx(0.0, abs=1e-9)
    assert host.router.request.alone_s + host.router.end.alone_s == pytest.approx(request_s)
    assert host.router.end.alone_s == pytest.approx(0.0, abs=1e-9), "all of it is before the first token"
    assert (host.text.step_s, host.text.sequence_s) == pytest.approx((step_s, sequence_s), abs=1e-9)
    assert host.text.request.alone_s == pytest.approx(request_s)
    assert host.text.request.together_s == pytest.approx(0.0, abs=1e-9)
    assert host.text.export.alone_s == pytest.approx(waited * export_s)
    assert host.text.transfer.alone_s == pytest.approx(waited * import_s)
    assert host.text.transfer_end.alone_s == pytest.approx((1 - waited) * (export_s + import_s) + switch_s)
    together_s = [cost.together_s for cost in (host.text.export, host.text.transfer, host.text.transfer_end)]
    assert together_s == pytest.approx([0.0] * 3, abs=1e-9)
    without = {kind: known for kind, known in measured.items() if not kind.startswith(("first", "transfer"))}
    unmeasured = Calibration({}, without).host(profiles, Item(16, 1000, 10_000), 2)
    assert (unmeasured.text.export, unmeasured.text.transfer) == (Cost(), Cost())
    assert (unmeasured.pass_speed, unmeasured.decode_speed, unmeasured.decodes_speed) == (1.0, 1.0, 1.0)


def test_the_benchmark_predicts_and_runs_the_same_requests(tmp_path: Path) -> None:
    said = figures_of("fidelity", tmp_path)
    [cell] = said["cells"]
    assert (cell["placement"], cell["requests"], cell["failed"]) == ("E+PD", 12, 0)
    assert cell["pace"] > 0
    assert cell["decode_pace"] > 0
    assert {error["figure"] for error in cell["errors"]} >= {"ttft p50", "tpot p90"}
    assert all(math.isfinite(error["error"]) and error["predicted_ms"] > 0 for error in cell["errors"])
    assert Host.parse(tomllib.loads(said["models"]["demo"]["host"])).router.request.alone_s > 0
    assert said["drifts"]
    assert len(said["not_run"]) == 98
