"""Catalogues of devices: what they may contain, and what is said of those that cannot be used."""

from copy import deepcopy
from typing import Any

import pytest

from triptych.domain.device import BadCatalogue, read_catalogue
from triptych.domain.embedding import DType

EFFICIENCY: dict[str, Any] = {
    "source": "assumed",
    "compute": 0.5,
    "attention": 0.4,
    "bandwidth": 0.8,
    "tensor_parallel": 0.9,
    "pass_s": 0.001,
    "sequence_s": 0.0,
    "layer_s": 0.0,
    "encode_layer_s": 0.0,
    "reduce_s": 0.0,
}
DEVICE: dict[str, Any] = {
    "title": "One",
    "kind": "gpu",
    "hardware": ["The One"],
    "source": "its data sheet",
    "tflops": {"bfloat16": 100, "float32": 10},
    "memory_gb": 10,
    "memory_gb_per_s": 1000,
    "host_gb_per_s": 20,
    "device_gb_per_s": 100,
    "network_gb_per_s": 5,
}
HOST: dict[str, Any] = {
    "source": "assumed",
    "disk_gb_per_s": 2,
    "process_s": 5,
    "prepare_s": 0.001,
    "prepare_s_per_megapixel": 0.01,
    "prepare_s_per_megabyte": 0.02,
    "transfer_s": 0.0001,
    "shm_gb_per_s": 8,
    "nixl_gb_per_s": 4,
    "tcp_gb_per_s": 2,
}
LINK: dict[str, Any] = {"title": "A wire", "gb_per_s": 10, "reached": 0.8, "transfer_s": 0.001, "source": "assumed"}
DOCUMENT: dict[str, Any] = {"efficiency": {"gpu": EFFICIENCY}, "host": HOST, "device": {"one": DEVICE}}


def test_units_are_those_of_the_rest_of_the_code() -> None:
    catalogue = read_catalogue(DOCUMENT)
    device = catalogue.device("one")
    assert device.flops_per_s == {DType.BF16: 100e12, DType.F32: 10e12}
    assert (device.memory_nbytes, device.memory_nbytes_per_s) == (10**10, 1e12)
    assert device.usable_nbytes == 9 * 10**9
    assert catalogue.host.prepare_s_per_pixel == pytest.approx(1e-8)
    assert catalogue.host.tcp_nbytes_per_s == 2e9


def test_a_device_takes_what_it_does_not_say_from_the_one_that_it_is_like_but_not_its_price() -> None:
    price = {"usd_per_hour": 3, "date": "2026-11-28", "source": "a list"}
    more = {
        "device": {
            "two": {"like": "one", "title": "Two", "memory_gb": 20, "efficiency": {"compute": 0.7}},
            "three": {"like": "two", "title": "Three", "price": price},
            "four": {"like": "three", "title": "Four"},
        }
    }
    catalogue = read_catalogue(DOCUMENT, more)
    two, three, four = (catalogue.device(name) for name in ("two", "three", "four"))
    assert (two.title, two.memory_nbytes, two.memory_nbytes_per_s) == ("Two", 2 * 10**10, 1e12)
    assert (two.efficiency.compute, two.efficiency.attention) == (0.7, 0.4)
    assert three.price is not None
    assert three.price.usd_per_hour == 3
    assert three.efficiency.compute == 0.7
    assert four.price is None


def test_another_file_replaces_devices_and_defaults_by_name() -> None:
    more = {"device": {"one": DEVICE | {"title": "Another"}}, "efficiency": {"gpu": EFFICIENCY | {"compute": 0.9}}}
    device = read_catalogue(DOCUMENT, more).device("one")
    assert (device.title, device.efficiency.compute) == ("Another", 0.9)


def test_a_link_has_what_transfers_reach_of_its_rate() -> None:
    catalogue = read_catalogue({**DOCUMENT, "link": {"wire": LINK}}, {"link": {"wifi": LINK | {"gb_per_s": 1}}})
    assert {name: link.nbytes_per_s for name, link in catalogue.links.items()} == {"wire": 8e9, "wifi": 0.8e9}


def test_cores_of_a_machine_add_up_but_not_their_memory() -> None:
    device = read_catalogue({**DOCUMENT, "device": {"cpu": DEVICE | {"per_core": True}}}).device("cpu")
    machine = device.of_cores(4, hardware="A CPU", memory_nbytes=77)
    assert machine.flops_per_s[DType.F32] == 40e12
    assert (machine.memory_nbytes_per_s, machine.memory_nbytes, machine.hardware) == (4e12, 77, ("A CPU",))


def test_the_speedup_of_a_degree_loses_a_share_at_each_doubling() -> None:
    device = read_catalogue(DOCUMENT).device("one")
    assert [device.speedup(degree) for degree in (1, 2, 4)] == [1, pytest.approx(1.8), pytest.approx(4 * 0.81)]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("device.one.tflop", 1, "device.one has an unknown entry 'tflop'; known are device_gb_per_s"),
        ("devices", {}, "the catalogue has an unknown entry 'devices'"),
        ("device.one.memory_gb", None, "device.one has no memory_gb"),
        ("device.one.memory_gb", -1, "device.one.memory_gb is '-1', not a number above 0"),
        ("device.one.memory_gb", "80", "device.one.memory_gb is '80', not a number above 0"),
        ("device.one.memory_gb", True, "device.one.memory_gb is 'True', not a number above 0"),
        ("device.one.memory_gb", float("nan"), "device.one.memory_gb is 'nan', not a number above 0"),
        ("device.one.tflops", {}, "device.one.tflops is not a table of rates by dtype"),
        ("device.one.tflops.int8", 1, "device.one.tflops has an unknown entry 'int8'"),
        ("device.one.kind", "tpu", "device.one.kind is 'tpu', must be one of gpu"),
        ("device.one.hardware", "The One", "device.one.hardware is not a list of names"),
        ("device.one.per_core", 1, "device.one.per_core is not true or false"),
        ("device.one.efficiency", {"compute": 1.2}, "device.one.efficiency.compute is '1.2', not a number above 0 and at most 1"),
        ("device.one.price", {"usd_per_hour": 1}, "device.one.price has no date"),
        (
            "device.one.price",
            {"usd_per_hour": 1, "date": "yesterday", "source": "x"},
            "device.one.price.date is 'yesterday', not a date",
        ),
        ("link", {"one": 1}, "link.one is not a table"),
        ("link", {"one": LINK | {"reached": 2}}, "link.one.reached is '2', not a number above 0 and at most 1"),
        ("device.two", {"like": "zero"}, "device.two.like is 'zero', which is not there"),
        ("device.two", {"like": "two"}, "device.two is like itself: two -> two"),
        ("device.two", 7, "device.two is not a table"),
        ("efficiency.gpu.pass_s", None, "efficiency.gpu has no pass_s"),
        ("efficiency.tpu", EFFICIENCY, "efficiency has an unknown entry 'tpu'"),
        ("host.tcp_gb_per_s", 0, "host.tcp_gb_per_s is '0', not a number above 0"),
        ("host.source", "", "host.source is not a text"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named_with_its_place(path: str, value: Any, message: str) -> None:
    document = deepcopy(DOCUMENT)
    *tables, name = path.split(".")
    table = document
    for key in tables:
        table = table[key]
    if value is None:
        del table[name]
    else:
        table[name] = value
    with pytest.raises(BadCatalogue) as raised:
        read_catalogue(document)
    assert str(raised.value).startswith(message)


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadCatalogue, match="there is no device 'h200'; there are one"):
        read_catalogue(DOCUMENT).device("h200")
