"""The roofline: passes by hand, memory with its limits, and profiles that predict the passes between their rows."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.domain.test_device import DOCUMENT
from triptych.domain.architecture import (
    CrossLayers,
    DecoderArchitecture,
    EncoderArchitecture,
    EncoderItem,
    Layers,
    Weights,
    Work,
    linear,
)
from triptych.domain.device import read_catalogue
from triptych.domain.embedding import DType
from triptych.domain.profile import Origin, dump_profile, parse_profile
from triptych.policy.capacity import Capacity, ItemClass, RequestClass, TextLimits, encode_capacity, text_capacity
from triptych.policy.costs import Costs, CostWarning
from triptych.policy.roofline import (
    DoesNotFit,
    Origins,
    Target,
    decoder_memory,
    decoder_profile,
    encode_pass,
    encoder_memory,
    encoder_profile,
    least_degree,
    step_pass,
)
from triptych.policy.sizing import choose_size

BF16 = DType.BF16
CATALOGUE = read_catalogue(DOCUMENT)
ONE = CATALOGUE.device("one")
"""50 TFLOP/s in products, 40 in attention, 800 GB/s, 1 ms a pass."""
TARGET = Target(ONE, BF16)
ORIGINS = Origins("ab" * 32, "2026-11-28T00:00:00Z", "computed")


def decoder(layers: int = 32, hidden: int = 2048, context: int = 4096) -> DecoderArchitecture:
    weights = linear(hidden, hidden, bias=False) * 12
    return DecoderArchitecture(
        layers=(Layers(layers, weights, width=hidden, kv_width=hidden // 4),),
        embedding=Weights(1000 * hidden),
        head=linear(hidden, 1000, bias=False),
        hidden_size=hidden,
        context_length=context,
        norm_parameters=hidden,
        heads=16,
        kv_heads=4,
        row_values=10 * hidden,
    )


DECODER = decoder()
ITEMS = tuple(
    EncoderItem(tokens, 2048 * tokens, Work(10**9 * tokens, 10**5 * tokens**2), 4 * tokens)
    for tokens in (64, 256, 1024)
)
ENCODER = EncoderArchitecture(parameters=300_000_000, depth=24, hidden_size=1024, row_values=6144, items=ITEMS)


def test_a_decode_step_waits_for_weights_and_then_for_keys_and_values() -> None:
    step = step_pass(DECODER, BF16, decodes=4, context=1000)
    weights_nbytes = 2 * (DECODER.parameters - DECODER.embedding.stored - 2048 + 4 * 2048)
    kv_nbytes = 4 * 1000 * DECODER.kv_token_nbytes(BF16)
    assert (step.weights_nbytes, step.kv_nbytes) == (weights_nbytes, kv_nbytes)
    assert TARGET.pass_s(step) == pytest.approx(0.001 + (weights_nbytes + kv_nbytes) / 800e9)


def test_a_long_prompt_waits_for_operations() -> None:
    step = step_pass(DECODER, BF16, new=2048)
    work = DECODER.prefill(2048)
    assert TARGET.pass_s(step) == pytest.approx(0.001 + work.products / 50e12 + work.attention / 40e12)


def test_a_step_with_both_reads_the_weights_once() -> None:
    both = step_pass(DECODER, BF16, decodes=8, context=500, new=64, cached=200)
    alone = step_pass(DECODER, BF16, decodes=8, context=500), step_pass(DECODER, BF16, new=64, cached=200)
    assert both.work.flops == sum(part.work.flops for part in alone)
    assert both.kv_nbytes == sum(part.kv_nbytes for part in alone)
    assert both.weights_nbytes < 1.01 * alone[0].weights_nbytes
    sum_s = sum(TARGET.pass_s(part) for part in alone)
    assert TARGET.pass_s(both) < 0.6 * sum_s


def test_cross_attention_adds_layers_and_states_of_items() -> None:
    cross = CrossLayers(Layers(8, linear(2048, 2048) * 10, 2048, 512), linear(2048, 1024))
    crossing = replace(DECODER, cross=cross)
    without = step_pass(crossing, BF16, decodes=4, context=1000)
    step = step_pass(crossing, BF16, decodes=4, context=1000, states=6404)
    assert without == step_pass(DECODER, BF16, decodes=4, context=1000)
    assert step.weights_nbytes - without.weights_nbytes == 2 * cross.parameters
    assert step.kv_nbytes - without.kv_nbytes == 4 * 6404 * 2 * 2 * 8 * 512
    assert step.work.attention - without.work.attention == 4 * 8 * 2048 * 4 * 6404
    first = step_pass(crossing, BF16, new=10, states=6404, new_states=6404)
    again = step_pass(crossing, BF16, new=10, states=6404)
    assert first.work.products - again.work.products == 2 * 6404 * 8 * 2048 * 1024


@pytest.mark.parametrize("new", [16, 64, 256, 1024, 2048])
@pytest.mark.parametrize("decodes", [1, 16, 64])
def test_tables_predict_steps_with_both(decodes: int, new: int) -> None:
    costs = Costs(decoder_profile(DECODER, TARGET, CATALOGUE.host, ORIGINS))
    exact_s = TARGET.pass_s(step_pass(DECODER, BF16, decodes=decodes, context=500, new=new))
    assert costs.step_s(decodes, 500, [(new, 0)]).value == pytest.approx(exact_s, rel=0.05)


def test_layers_take_at_least_the_time_to_start_them_unless_they_are_replayed() -> None:
    slow = TARGET.reaching(replace(ONE.efficiency, layer_s=0.01, encode_layer_s=0.002))
    assert slow.pass_s(step_pass(DECODER, BF16, new=600)) == pytest.approx(0.001 + 32 * 0.01)
    assert slow.pass_s(step_pass(DECODER, BF16, new=100)) == TARGET.pass_s(step_pass(DECODER, BF16, new=100))
    many = step_pass(DECODER, BF16, decodes=600, context=10)
    assert slow.pass_s(many) == TARGET.pass_s(many)
    encode = encode_pass(ENCODER, ITEMS[0], 1, BF16)
    assert slow.pass_s(encode) == pytest.approx(0.001 + 24 * 0.002)


def test_tensor_parallelism_divides_the_work_and_adds_all_reduces() -> None:
    step = step_pass(DECODER, BF16, new=2048)
    one_s, four_s = (TARGET.pass_s(step) - 0.001), (Target(ONE, BF16, 4).pass_s(step) - 0.001)
    nbytes = 2 * 3 / 4 * 2048 * 2048 * 2
    assert four_s == pytest.approx(one_s / (4 * 0.9**2) + 2 * 32 * nbytes / 100e9)


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="the catalogue has no rate of one for F16, only for BF16, F32"):
        Target(ONE, DType.F16).pass_s(step_pass(DECODER, DType.F16, new=1))


def test_memory_is_weights_activations_and_the_rest_for_keys_and_values() -> None:
    memory = decoder_memory(DECODER, TARGET)
    assert memory.weights_nbytes == 2 * DECODER.parameters
    assert memory.activations_nbytes == 2048 * 20480 * 2
    assert memory.free_nbytes == 9 * 10**9 - memory.weights_nbytes - memory.activations_nbytes
    assert memory.kv_tokens == memory.free_nbytes // (2 * 2 * 32 * 512)


def test_devices_share_weights_and_as_many_keys_as_there_are_heads() -> None:
    two, eight = (decoder_memory(DECODER, Target(ONE, BF16, degree)) for degree in (2, 8))
    assert two.kv_token_nbytes == DECODER.kv_token_nbytes(BF16) // 2
    assert eight.kv_token_nbytes == DECODER.kv_token_nbytes(BF16) // 4
    assert eight.weights_nbytes == 2 * DECODER.parameters // 8


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    large = decoder(layers=120)
    with pytest.raises(DoesNotFit) as raised:
        decoder_memory(large, TARGET)
    assert str(raised.value) == (
        "1 x one cannot hold it: weights take 12.1 GB of each device and the activations, keys and values of 2048 tokens 0.6 GB, "
        "of 9.0 GB that engines use of 10 GB"
    )
    assert least_degree(large, TARGET) == 2
    assert least_degree(decoder(layers=12000), TARGET) is None
    with pytest.raises(
        DoesNotFit, match="a tensor-parallel degree of 3 does not divide the number of attention heads, 16"
    ):
        decoder_memory(DECODER, Target(ONE, BF16, 3))
    with pytest.raises(
        DoesNotFit, match=r"weights take 40.0 GB of each device and the activations of 4096 rows 0.1 GB"
    ):
        encoder_memory(replace(ENCODER, parameters=20 * 10**9), TARGET)


def test_a_decoders_profile_predicts_passes_between_its_rows() -> None:
    profile = decoder_profile(DECODER, TARGET, CATALOGUE.host, ORIGINS)
    costs = Costs(parse_profile(dump_profile(profile)))
    for new, cached in ((20, 0), (333, 0), (2900, 0), (1500, 800), (70, 3000)):
        exact_s = TARGET.pass_s(step_pass(DECODER, BF16, new=new, cached=cached))
        estimate = costs.prefill_s(new, cached)
        assert estimate.value == pytest.approx(exact_s, rel=0.02)
        assert estimate.warnings == {CostWarning.SYNTHETIC}
    for batch, context in ((3, 100), (50, 1000), (200, 700)):
        exact_s = TARGET.pass_s(step_pass(DECODER, BF16, decodes=batch, context=context))
        assert costs.decode_s(batch, context).value == pytest.approx(exact_s, rel=0.03)


def test_a_decoders_profile_has_only_what_its_memory_holds() -> None:
    profile = decoder_profile(DECODER, TARGET, CATALOGUE.host, ORIGINS)
    tokens = decoder_memory(DECODER, TARGET).kv_tokens
    assert max(row.batch * row.mean_context for row in profile.decode) <= tokens
    assert max(row.new_tokens + row.cached_tokens for row in profile.prefill) == 4096
    assert profile.measured.kv_token_nbytes == DECODER.kv_token_nbytes(BF16)
    assert profile.measured.load_s == pytest.approx(2 * DECODER.parameters / 2e9)
    assert profile.measured.start_s == pytest.approx(5 + profile.measured.load_s)
    assert profile.measured.origin is Origin.SYNTHETIC


def test_an_encoders_profile_has_passes_preparation_and_pulls() -> None:
    profile = encoder_profile(ENCODER, TARGET, CATALOGUE.host, ORIGINS)
    costs = Costs(parse_profile(dump_profile(profile)))
    assert costs.encode_s(256, 4).value == pytest.approx(TARGET.pass_s(encode_pass(ENCODER, ITEMS[1], 4, BF16)))
    assert costs.prepare_s(nbytes=100_000, pixels=500_000).value == pytest.approx(0.001 + 0.005 + 0.002, rel=0.01)
    assert costs.transfer_s("shm", 8_000_000).value == pytest.approx(0.0001 + 0.001, rel=0.01)
    assert costs.transfer_s("tcp", 8_000_000).value == pytest.approx(0.0001 + 0.004, rel=0.01)
    assert profile.measured.output_token_nbytes == 2048


def test_capacities_and_sizes_come_from_computed_profiles_as_from_measured_ones() -> None:
    """Of a model that needs two of these devices."""
    large, dtype = decoder(layers=100), BF16

    def capacity_of(degree: int) -> Callable[[int], Capacity]:
        target = Target(ONE, dtype, degree)
        costs = Costs(decoder_profile(large, target, CATALOGUE.host, ORIGINS))
        kv_tokens = decoder_memory(large, target).kv_tokens
        mix = [RequestClass(500, 100)]
        return lambda batch: text_capacity(
            costs, mix, ttft_slo_s=2, tbt_slo_s=0.1, limits=TextLimits(batch, 2048, kv_tokens)
        )

    least = least_degree(large, TARGET)
    assert least == 2
    chosen = choose_size({degree: capacity_of(degree) for degree in (least, 4)}, most=256)
    assert chosen.capacity.per_s > 1
    assert chosen.max_batch > 8
    assert chosen.capacity.warnings >= {CostWarning.SYNTHETIC}
    encode = encode_capacity(
        Costs(encoder_profile(ENCODER, TARGET, CATALOGUE.host, ORIGINS)), [ItemClass(256)], 1.0, max_items=8
    )
    assert 0.5 < encode.per_s * TARGET.pass_s(encode_pass(ENCODER, ITEMS[1], 8, BF16)) / 8 < 1
