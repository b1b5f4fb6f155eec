"""EPD-Serve: weights that stages do not hold (section 4.3), and what memory bears (tables 2, 3 and 8).

Memory per patch or image depends on engines that the paper does not describe. But it is one number for each model and
system: so one row of a table, or two where there is a constant part, give the others. Counts are rounded
down: the capacity is taken to be in the middle between that of the given count and of one more.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Self

from benchmarks.papers.rows import Row
from benchmarks.papers.simulation import Served, at_once, cluster, costs, goodput, mix, plan, serve, with_encoder
from triptych.cli.presets import PresetName
from triptych.domain.architecture import linear
from triptych.domain.embedding import DType
from triptych.domain.stage import ModelPart
from triptych.families.architecture import Architecture
from triptych.families.model_files import ModelFiles
from triptych.sim.run import simulate as by_services
from triptych.sim.scenario import Deployment
from triptych.testing.model import FakeFamily
from triptych.workload.requests import Mix, Size

TITLE = "EPD-Serve"
_INTERNLM: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 92553,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}
"""InternLM2 has the parameters of a Llama."""
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "MiniCPM-V 2.6": {
        "model_type": "llava",
        "image_token_index": 1,
        "vision_feature_select_strategy": "full",
        "text_config": {
            "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151666,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
            "num_attention_heads": 16, "image_size": 980, "patch_size": 14, "vision_use_head": False,
        },
    },
    "InternVL2-8B": {
        "model_type": "internvl",
        "tie_word_embeddings": False,
        "text_config": {**_INTERNLM, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "attention_bias": True},
    },
    "InternVL2-26B": {
        "model_type": "internvl",
        "tie_word_embeddings": False,
        "text_config": {**_INTERNLM, "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 48, "num_attention_heads": 48},
        "vision_config": {
            "hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 45, "num_attention_heads": 25,
            "use_qk_norm": True, "norm_type": "rms_norm",
        },
    },
}  # fmt: skip
SAVED = {"MiniCPM-V 2.6": (95, 5), "InternVL2-8B": (96.2, 3.7), "InternVL2-26B": (78.3, 21.6)}
"""Weights that encode and prefill instances do not hold, %."""
TABLE_3 = {
    # patches of an image, at each resolution: batches of ten images that fit encode and prefill instances
    "MiniCPM-V 2.6": {1: (49, 86), 3: (16, 29), 10: (4, 9)},
    "InternVL2-8B": {3: (67, 10), 13: (15, 2)},
    "InternVL2-26B": {3: (22, 4), 13: (6, 1)},
}
TABLE_2 = {
    # images that fit a request, at each number of patches: DistServe and EPD
    "MiniCPM-V 2.6": {1: (77, 490), 3: (26, 165), 10: (7, 49)},
    "InternVL2-26B": {3: (11, 45), 13: (1, 10)},
}
TABLE_8 = {
    # images in a request: memory left for keys and values, %, of DistServe and EPD. None: it does not fit
    "MiniCPM-V 2.6": {5: (86, 99), 10: (74, 97), 20: (49, 95), 40: (None, 92)},
    "InternVL2-26B": {5: (67, 89), 10: (36, 80), 20: (None, 63)},
}


def tower_share(name: str) -> float:
    """Share of the vision transformer in all parameters, without the projector."""
    config = CONFIGS[name]
    architecture = Architecture.load(ModelFiles(Path(), config, {}, {}, {}, {}, None))
    encoder, hidden = architecture.encoder([], DType.F16), architecture.family.hidden_size
    joined = encoder.hidden_size * (4 if config["model_type"] == "internvl" else 1)
    projector = linear(joined, hidden).stored + linear(hidden, hidden).stored
    projector += 2 * joined if config["model_type"] == "internvl" else 0
    return (encoder.parameters - projector) / (encoder.parameters + architecture.decoder.parameters)


def rows() -> Iterator[Row]:
    for name, (encode, prefill) in SAVED.items():
        share = 100 * tower_share(name)
        yield Row("4.3", f"{name}: encode instances save, %", encode, 100 - share, "the tower without its projector")
        yield Row("4.3", f"{name}: prefill instances save, %", prefill, share, "the tower without its projector")
    for table, published, systems in (("3", TABLE_3, ("encode", "prefill")), ("2", TABLE_2, ("DistServe", "EPD"))):
        for name, by_patches in published.items():
            for column, system in enumerate(systems):
                yield from _by_patches(
                    table, f"{name}, {system}", {patches: both[column] for patches, both in by_patches.items()}
                )
    for name, by_images in TABLE_8.items():
        for column, system in enumerate(("DistServe", "EPD")):
            yield from _by_images(f"{name}, {system}", {images: both[column] for images, both in by_images.items()})


def _by_patches(table: str, what: str, counts: Mapping[int, int]) -> Iterator[Row]:
    """Patches in memory are one number: the row with the fewest for each image gives the others."""
    (first, most), *others = sorted(counts.items())
    for patches, count in others:
        differs = (
            f"the given row is {most * first} to {(most + 1) * first} patches in memory, this one {count * patches} to "
            f"{(count + 1) * patches}, in the same units"
        )
        ours = (2 * most + 1) * first // (2 * patches)
        yield Row(table, f"{what}: {patches} patches an image", count, ours, f"from {most} of {first}", differs)


def _by_images(what: str, left: Mapping[int, float | None]) -> Iterator[Row]:
    """Memory of images grows with their number: two rows give the others."""
    (first, first_left), (second, second_left), *others = sorted(left.items())
    assert first_left is not None
    assert second_left is not None
    per_image = (first_left - second_left) / (second - first)
    rounding = 1 / (second - first)
    for images, published in others:
        ours, more = second_left - per_image * (images - second), rounding * (images - second)
        differs = f"the given rows are rounded to 1 %: {ours - more:.0f} to {ours + more:.0f} % would be left"
        yield Row(
            "8",
            f"{what}: {images} images",
            published,
            ours if ours > 0 else None,
            f"from {first} and {second} images",
            differs,
        )


# --- simulated --------------------------------------------------------------------------------------------------------

MINICPM = "MiniCPM-V 2.6"
SLICE_TOKENS, SLICES = 64, 10
"""Of a slice of MiniCPM-V; slices of an image of 4032 x 3024, the whole image included."""
_PATCH_PX = 8
DEVICE, RATE, REQUESTS = "a100-80", 0.25, 100
TABLE_4 = {2: (0.92, 1.46), 4: (1.02, 2.47), 6: (1.14, 3.37), 8: (1.74, 4.27)}
"""By images of a request: mean TTFT, s, with and without intra-request parallelism."""
TABLE_1 = {8: (0.42, 0.42, 0.24), 16: (0.82, 0.81, 0.30), 32: (1.59, 1.54, 0.49), 64: (3.11, 3.08, 1.00)}
"""By frames of a video: mean TTFT, s, of vLLM, DistServe and EPD, at 1 request/s."""
TABLE_5 = {"goodput, requests/s": (1.25, 0.56), "TTFT, s": (2.12, 4.48), "TPOT, s": (0.031, 0.025)}
"""The optimizer's configuration, and random ones on average. The latencies are at 1.25 requests/s."""
TABLE_6 = {"latency, s": (28.01, 61.10), "TPOT, s": (0.05, 0.12)}
"""With switching of roles and without."""
TABLE_9 = {2: (1.40, 0.04), 4: (2.60, 0.04), 6: (3.90, 0.06), 8: (5.10, 0.06)}
"""Objectives of TTFT and TPOT of MiniCPM-V, s, by images."""
IMAGE_TOKENS = {"InternVL2-8B": 13 * 256, "InternVL2-26B": 13 * 256}
"""Of an image of 4032 x 3024."""
REDUCTIONS = {"InternVL2-8B": (0.08, 32.8), "InternVL2-26B": (0.08, 44.9)}
"""Rate, and the largest reduction of TTFT against DistServe, %."""
SINGLE = ("--max-sequences=1",)
BATCH_OF_ONE = ("--max-batch-items=1",)
FIRST_COME = ("--ordering=first-come",)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What two published rows say of a model whose time goes to preparation that the paper does not describe."""

    token_s: float
    """Encoding of a token of an item, with its preparation."""
    request_s: float
    """Of a request, on no device."""

    @classmethod
    def of(cls, first: tuple[int, float], second: tuple[int, float], item_tokens: int, prefill_s: float) -> Self:
        """From the TTFTs of requests whose items are encoded one after another; ``prefill_s`` is that of one item."""
        item_s = (second[1] - first[1]) / (second[0] - first[0])
        return cls((item_s - prefill_s) / item_tokens, first[1] - first[0] * item_s)


def minicpm(
    roles: str,
    measured: MeasuredCosts,
    *,
    most: int = 1,
    batch: int = 1,
    preset: PresetName | None = None,
) -> Deployment:
    """MiniCPM-V with such costs: rows of patches stand for slices, which are the units of an image."""
    made = cluster(
        CONFIGS[MINICPM], roles, DEVICE, preset=preset,
        router=(*FIRST_COME, "--sharding=never"),
        encoder=(f"--max-batch-items={batch}", "--max-batch-tokens=65536"),
        text=(f"--max-sequences={most}", "--token-budget=32768"),
        switches=preset is not None,
    )  # fmt: skip
    family = FakeFamily(
        _PATCH_PX, 1 << 16, hidden_size=made.model.hidden_size, context_length=made.model.context_length
    )
    return with_encoder(replace(made, family=family), measured.token_s)


def slices(number: int) -> Size:
    """An item of so many slices."""
    return Size(_PATCH_PX * SLICE_TOKENS, _PATCH_PX * number)


def requests_of(items: int, slices_each: int, *, together: bool = False, output_tokens: str = "10") -> Mix:
    """``together``: the items of a request are one, as where one instance encodes all of them."""
    number, size = (1, slices(items * slices_each)) if together else (items, slices(slices_each))
    return mix(images=str(number), size=size, text_tokens="22", output_tokens=output_tokens)


def prefill_s(tokens: int) -> float:
    """Of MiniCPM-V's decoder for so many tokens of a long prompt."""
    decoder = costs(cluster(CONFIGS[MINICPM], "E:1,P:1,D:1", DEVICE), ModelPart.DECODER)
    short, long = 1024, 4096
    return (decoder.prefill_s(long).value - decoder.prefill_s(short).value) * tokens / (long - short)


def table_4_costs() -> MeasuredCosts:
    first, second = ((images, TABLE_4[images][1]) for images in (2, 4))
    return MeasuredCosts.of(first, second, SLICES * SLICE_TOKENS, prefill_s(SLICES * SLICE_TOKENS))


def simulated() -> Iterator[Row]:
    yield from _table_4()
    yield from _table_1()
    yield from _table_5()
    yield from _table_6()
    yield from _reductions()
    yield from _offline()
    yield from _attainment()


def _table_4() -> Iterator[Row]:
    measured = table_4_costs()
    image_s = SLICES * SLICE_TOKENS * measured.token_s
    assumed = (
        f"{1000 * image_s:.0f} ms to encode an image and {1000 * measured.request_s:.0f} ms of a request, from the rows without it at 2 and 4 "
        "images; whole images on 6E1P1D (E.4)"
    )
    made = minicpm("E:6,P:1,D:1", measured)
    for images, (with_it, without) in TABLE_4.items():
        for what, published, together in (("with", with_it, False), ("without", without, True)):
            if together and images <= 4:
                continue
            load = requests_of(images, SLICES, together=together)
            ours = serve(made, plan(load, RATE, REQUESTS, 1)).ttft_s + measured.request_s
            left_s = with_it - -(-images // 6) * image_s - images * prefill_s(SLICES * SLICE_TOKENS)
            differs = f"this row leaves {left_s:.2f} s of a request beside encoding and prefill, those without it {measured.request_s:.2f} s"
            yield Row(
                "4", f"{what} intra-request parallelism, {images} images: TTFT, s", published, ours, assumed, differs
            )


def _table_1() -> Iterator[Row]:
    for column, (system, roles) in enumerate((("vLLM", "EPD:8"), ("DistServe", "EP:7,D:1"), ("EPD", "E:5,P:2,D:1"))):
        fitted = 1 if system == "EPD" else column
        first, second = ((frames, TABLE_1[frames][fitted]) for frames in (8, 16))
        measured = MeasuredCosts.of(first, second, SLICE_TOKENS, prefill_s(SLICE_TOKENS))
        made = minicpm(roles, measured)
        frame_s = SLICE_TOKENS * measured.token_s
        of = "DistServe's" if system == "EPD" else "its"
        assumed = (
            f"{1000 * frame_s:.0f} ms to encode a frame and {1000 * measured.request_s:.0f} ms of a request, from {of} rows of 8 and 16 "
            f"frames; {roles}"
        )
        for frames, published in TABLE_1.items():
            if system != "EPD" and frames <= 16:
                continue
            load = requests_of(frames, 1, together=system != "EPD")
            ours = serve(made, plan(load, 1.0, REQUESTS, 1)).ttft_s + measured.request_s
            alone_s = -(-frames // 5) * frame_s + frames * prefill_s(SLICE_TOKENS) + measured.request_s
            differs = (
                f"alone a request takes {alone_s:.2f} s; at 1 request/s encoders are busy for {frames * frame_s / 5:.0%} of the time, so some "
                f"wait; published are {published[column] - alone_s:+.2f} s of that"
            )
            yield Row("1", f"{system}, {frames} frames: TTFT, s", published[column], ours, assumed, differs)


def _table_5() -> Iterator[Row]:
    """Of 21 allocations, with batches of 2, 1 and 128."""
    measured, load = table_4_costs(), requests_of(6, SLICES)
    ttft_slo_s, tpot_slo_s = TABLE_9[6]
    found: dict[str, tuple[float, Served]] = {}
    for roles in allocations(8):
        made = minicpm(roles, measured, batch=2, most=128)

        def good(rate: float, made: Deployment = made) -> bool:
            served = serve(made, plan(load, rate, 60, 1))
            return served.attained(ttft_slo_s - measured.request_s, tpot_slo_s) >= 0.9

        found[roles] = goodput(good, 0.2, 3.2, precision=0.1), serve(made, plan(load, 1.25, REQUESTS, 1))
    rate, chosen = found["E:6,P:1,D:1"]
    encode_s = 6 * SLICES * SLICE_TOKENS * measured.token_s
    bears = f"six encoders bear {6 / encode_s:.2f} requests/s of six images"
    ours = {
        "goodput, requests/s": (rate, mean(goodput_per_s for goodput_per_s, _ in found.values())),
        "TTFT, s": (
            chosen.ttft_s + measured.request_s,
            mean(served.ttft_s + measured.request_s for _, served in found.values()),
        ),
        "TPOT, s": (chosen.tpot_s, mean(served.tpot_s for _, served in found.values())),
    }
    differs = {
        "goodput, requests/s": (
            f"{bears} at the costs of table 4: at 1.25 they are busy for {1.25 * encode_s / 6:.0%} of the time",
            f"the mean of ten such draws has a standard error of {stdev(goodput_per_s for goodput_per_s, _ in found.values()) / 10**0.5:.2f}",
        ),
        "TTFT, s": (
            f"{bears}; at {1.25 * encode_s / 6:.0%} load the wait is short, so table 4's 1.14 s (alone) and 2.12 s do not belong together",
            f"with 1 or 2 encoders, which bear {1 / encode_s:.2f} and {2 / encode_s:.2f} requests/s, it grows with the length of the run",
        ),
        "TPOT, s": ("", ""),
    }
    step_ms = 1000 * costs(minicpm("E:6,P:1,D:1", measured), ModelPart.DECODER).decode_s(1, 4000).value
    eager = f"a step is computed to take {step_ms:.0f} ms, as a recorded graph; the paper runs without graphs"
    for what, (optimized, random_ones) in TABLE_5.items():
        reasons = (eager, eager) if what.startswith("TPOT") else differs[what]
        yield Row(
            "5",
            f"6E1P1D: {what}",
            optimized,
            ours[what][0],
            "costs of table 4's rows; batches of 2, 1 and 128",
            reasons[0],
        )
        yield Row(
            "5", f"random configurations: {what}", random_ones, ours[what][1],
            "mean of all 21 allocations; the paper draws 10, of batch sizes and without parallelism as well", reasons[1],
        )  # fmt: skip
    best = max(found, key=lambda roles: found[roles][0])
    yield Row(
        "5", "encoders of the allocation with the highest goodput", 6, encoders_of(best), "costs of table 4's rows"
    )


def allocations(devices: int) -> Iterator[str]:
    """All numbers of encoders, prefill and decode instances."""
    for encoders in range(1, devices - 1):
        for prefills in range(1, devices - encoders):
            yield f"E:{encoders},P:{prefills},D:{devices - encoders - prefills}"


def encoders_of(roles: str) -> int:
    return int(roles.partition(",")[0].removeprefix("E:"))


def _table_6() -> Iterator[Row]:
    """100 requests, of which the first ten have 50 tokens of answer and the others 500."""
    measured = table_4_costs()
    short, long = (requests_of(1, SLICES, output_tokens=tokens) for tokens in ("50", "500"))
    arrivals = plan(long, 3.0, REQUESTS, 1)
    shifted = replace(arrivals, requests=[*plan(short, 3.0, REQUESTS, 1).requests[:10], *arrivals.requests[10:]])
    start = "E:5,P:1,D:2"
    without, at_128 = (serve(minicpm(start, measured, most=most), shifted) for most in (1, 128))
    switching = serve(minicpm(start, measured, preset="epd"), shifted, simulate=by_services)
    step_ms = 1000 * costs(minicpm(start, measured), ModelPart.DECODER).decode_s(1, 1024).value
    batch = f"45 answers of 500 steps of {step_ms:.0f} ms one after another on each of two instances; with batches of 128 it is {at_128.latency_s:.1f} s"
    assumed = "one sequence in a step, as E.1 has it for requests online"
    (latency, latency_without), (tpot, tpot_without) = TABLE_6.values()
    yield Row(
        "6",
        "latency without switching over that with it",
        latency_without / latency,
        without.latency_s / switching.latency_s,
        assumed,
    )
    yield Row(
        "6", "TPOT without switching over that with it", tpot_without / tpot, without.tpot_s / switching.tpot_s, assumed,
        "TPOT counts the wait before the second token, and is rounded to 0.05: the published ratio lies between 2.1 and 2.8",
    )  # fmt: skip
    yield Row("6", "latency without switching, s", latency_without, without.latency_s, assumed, batch)
    yield Row(
        "6",
        "latency with switching, s",
        latency,
        switching.latency_s,
        assumed,
        "follows from the same; the ratio does not depend on it",
    )


def _reductions() -> Iterator[Row]:
    """From the configurations alone: encoding as computed, preparation as in the catalogue."""
    for name, (rate, published) in REDUCTIONS.items():
        apart, together = (
            cluster(
                CONFIGS[name],
                roles,
                DEVICE,
                router=(*FIRST_COME, "--sharding=never"),
                encoder=BATCH_OF_ONE,
                text=SINGLE,
            )
            for roles in ("E:5,P:2,D:1", "EP:1,D:1")
        )
        reductions = []
        for images in (2, 8):
            load = mix(images=str(images), size=Size(4032, 3024), text_tokens="22", output_tokens="10")
            ttfts_s = [
                serve(made, plan(load, rate_per_s, 12, 1)).ttft_s
                for made, rate_per_s in ((apart, rate), (together, rate / 20))
            ]
            reductions.append(100 * (1 - ttfts_s[0] / ttfts_s[1]))
        tokens = IMAGE_TOKENS[name]
        encode_s = costs(apart, ModelPart.ENCODER).encode_s(tokens).value
        prefill = costs(apart, ModelPart.DECODER)
        image_s = prefill.prefill_s(2 * tokens).value - prefill.prefill_s(tokens).value
        differs = (
            f"an image is computed to take {1000 * encode_s:.0f} ms to encode and {1000 * image_s:.0f} ms to prefill; with 8 images on five "
            f"encoders, {published} % need {1000 * image_s * published / (75 - published):.0f} ms to encode, with preparation"
        )
        yield Row(
            "4.2", f"{name}: largest reduction of TTFT against DistServe, %", published, max(reductions),
            "from the configuration alone, of 2 and 8 images; 5E2P1D against a request alone at an instance that encodes and prefills", differs,
        )  # fmt: skip


def _offline() -> Iterator[Row]:
    """Throughput of 1,000 requests with an image each that are all there, by the number of encoders."""
    measured, load = table_4_costs(), requests_of(1, SLICES)
    rates = {}
    for encoders in range(1, 7):
        made = minicpm(f"E:{encoders},P:{7 - encoders},D:1", measured, batch=8, most=128)
        rates[encoders] = serve(made, at_once(load, 300, 1)).requests_per_s
    image_s = SLICES * SLICE_TOKENS * measured.token_s
    yield Row(
        "fig. 10", "encoders with the highest throughput, of 7 encoders and prefill instances", 5, max(rates, key=lambda at: rates[at]),
        "costs of table 4's rows; 300 of the 1,000 requests",
        f"6 encoders bear {6 / image_s:.1f} images/s and one prefill instance {1 / prefill_s(640):.1f}; E.4 finds 6E1P1D as well",
    )  # fmt: skip


def _attainment() -> Iterator[Row]:
    """Section 4.1 says that the baselines often attain less than 10 %."""
    measured = table_4_costs()
    made = minicpm("EP:7,D:1", measured)
    images, most = 4, 10
    ttft_slo_s, tpot_slo_s = TABLE_9[images]
    served = serve(made, plan(requests_of(images, SLICES, together=True), 0.1, REQUESTS, 1))
    yield Row(
        "4.1", f"DistServe, {images} images: attainment at 0.1 requests/s, %", most,
        100 * served.attained(ttft_slo_s - measured.request_s, tpot_slo_s), "costs of table 4's rows; 7P1D",
        f"contradicts table 4, which has a TTFT of {TABLE_4[images][1]} s without intra-request parallelism; the objective is {ttft_slo_s} s",
        is_bound=True,
    )  # fmt: skip
