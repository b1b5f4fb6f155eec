"""Profiles are read strictly and written stably."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.embedding import DType
from triptych.domain.profile import (
    MAX_PROFILE_BYTES,
    MAX_ROWS,
    BadProfile,
    DecodeRow,
    EncodeRow,
    ErrorRow,
    LoadRow,
    Measured,
    Origin,
    PrefillRow,
    PrepareRow,
    Profile,
    ProfileIdentity,
    TransferRow,
    dump_profile,
    parse_profile,
)
from triptych.domain.stage import ModelPart, Stage

IDENTITY = ProfileIdentity(
    part=ModelPart.ENCODER,
    digest="ab" * 32,
    stages=frozenset({Stage.ENCODE}),
    hardware="AMD EPYC 7B13",
    dtype=DType.F32,
    software="triptych/0.1.0",
    options={"threads": "1"},
)
PROFILE = Profile(
    IDENTITY,
    Measured(Origin.MEASURED, "2026-11-22T10:00:00Z", took_s=12.5, drift=-0.02, weights_nbytes=1000, load_s=0.5),
    encode=(EncodeRow(196, 2, 0.2), EncodeRow(196, 1, 0.1)),
    prepare=(PrepareRow(1000, 200_000, 0.01),),
    transfer=(TransferRow("shm", 4096, 0.001),),
    load=(LoadRow(Stage.ENCODE, 4, 196, 0, 1000.0, 0.1, 0.2, 0.3, 0.15, 0.03),),
    errors=(ErrorRow("encode", 2, 0.01, 0.05),),
)


def test_a_profile_is_read_as_it_was_written() -> None:
    text = dump_profile(PROFILE)
    read = parse_profile(text)
    assert read == replace(PROFILE, encode=tuple(sorted(PROFILE.encode)))
    assert parse_profile(text.encode()) == read


def test_the_same_profile_is_always_the_same_text() -> None:
    other = replace(PROFILE, encode=PROFILE.encode[::-1], identity=replace(IDENTITY, stages=frozenset({Stage.ENCODE})))
    assert dump_profile(other) == dump_profile(PROFILE)


def test_each_part_hardware_dtype_degree_and_engine_has_a_file_of_its_own() -> None:
    others = (
        replace(IDENTITY, part=ModelPart.DECODER),
        replace(IDENTITY, digest="cd" * 32),
        replace(IDENTITY, hardware="NVIDIA H200"),
        replace(IDENTITY, dtype=DType.BF16),
        replace(IDENTITY, tensor_parallel=2),
        replace(IDENTITY, options={"threads": "1", "vllm": ""}),
    )
    names = {replace(PROFILE, identity=identity).file_name for identity in (IDENTITY, *others)}
    assert len(names) == 7
    assert PROFILE.file_name == "encoder-abababababab-amd-epyc-7b13-f32-tp1.json"
    assert replace(PROFILE, identity=replace(IDENTITY, options={}, software="2")).file_name == PROFILE.file_name


def edit(change: Callable[[dict[str, Any]], object]) -> str:
    document = json.loads(dump_profile(PROFILE))
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda document: document.update(version=2), "it has version 2, only version 1 is supported"),
        (lambda document: document.update(version=True), "it has version True, only"),
        (lambda document: document.update(format="x"), "it is not a profile"),
        (lambda document: document.update(colour=1), "unknown key 'colour'"),
        (lambda document: document.pop("decode"), "lacks 'decode'"),
        (lambda document: document["identity"].update(colour=1), "identity has an unknown key"),
        (lambda document: document["identity"].pop("digest"), "identity lacks 'digest'"),
        (lambda document: document["identity"].update(digest="../../etc/passwd"), "identity.digest"),
        (lambda document: document["identity"].update(part="tower"), "identity.part is 'tower', which is not known"),
        (lambda document: document["identity"].update(stages=["encode", "encode"]), "a stage twice"),
        (lambda document: document["identity"].update(stages=[]), "identity.stages"),
        (lambda document: document["identity"].update(tensor_parallel=0), "identity.tensor_parallel"),
        (lambda document: document["identity"].update(hardware=""), "identity.hardware is empty"),
        (lambda document: document["identity"].update(hardware="a\x1b[2J"), "unprintable"),
        (lambda document: document["identity"].update(software="x" * 513), "at most 512 characters"),
        (lambda document: document["identity"].update(options={str(n): "" for n in range(65)}), "65 entries"),
        (lambda document: document["identity"].update(options={"threads": 1}), "identity.options.threads"),
        (lambda document: document["measured"].update(origin="guessed"), "measured.origin"),
        (lambda document: document["measured"].update(load_s=-1), "measured.load_s"),
        (lambda document: document["measured"].update(drift=-1.1), "measured.drift"),
        (lambda document: document["measured"].update(weights_nbytes=1.5), "measured.weights_nbytes"),
        (lambda document: document.update(encode={}), "encode is not a list"),
        (
            lambda document: document["encode"].append([1, 2]),
            "row 2 of encode must have 3 columns: item_tokens, items, seconds",
        ),
        (lambda document: document["encode"].append([196, 1, 9.0]), "row 2 of encode repeats 196, 1"),
        (lambda document: document["encode"].append([196, 3, 0]), "seconds in row 2 of encode"),
        (lambda document: document["encode"].append([196, 3, -0.1]), "seconds in row 2 of encode"),
        (lambda document: document["encode"].append([196, 3, 10**400]), "seconds in row 2 of encode"),
        (
            lambda document: document["encode"].append([196, 3, 1e-300]),
            "seconds in row 2 of encode is not a number from 1e-18 to 1e+18",
        ),
        (lambda document: document["encode"].append([196, 3, 1e300]), "seconds in row 2 of encode"),
        (lambda document: document["encode"].append([196, 3, 1e308]), "seconds in row 2 of encode"),
        (lambda document: document["encode"].append([196, 3, True]), "seconds in row 2 of encode"),
        (lambda document: document["encode"].append([196, 0, 0.1]), "items in row 2 of encode"),
        (lambda document: document["encode"].append([196.5, 3, 0.1]), "item_tokens in row 2 of encode"),
        (lambda document: document["encode"].append([2**60, 3, 0.1]), "item_tokens in row 2 of encode"),
        (lambda document: document["load"][0].__setitem__(0, "think"), "stage in row 0 of load"),
        (
            lambda document: document.update(decode=[[n + 1, 1, 0.1] for n in range(MAX_ROWS + 1)]),
            "at most 4096 are allowed",
        ),
    ],
)
def test_what_is_wrong_is_refused_and_named(change: Callable[[dict[str, Any]], object], said: str) -> None:
    with pytest.raises(BadProfile) as refused:
        parse_profile(edit(change))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is not JSON"),
        ("[]", "it is not a profile"),
        ("[" * 100_000, "it is not JSON"),
        (b"\xff\xfe\xff", "it is not JSON"),
        ("9" * 5000, "it is not JSON"),
        ('{"format": "triptych-profile", "format": "triptych-profile"}', "twice"),
        ('{"format": NaN}', "NaN is not a number"),
        (" " * (MAX_PROFILE_BYTES + 1), "at most"),
    ],
)
def test_what_is_no_profile_is_refused(text: str | bytes, said: str) -> None:
    with pytest.raises(BadProfile) as refused:
        parse_profile(text)
    assert said in str(refused.value)


def test_a_profile_that_could_not_be_read_is_not_written() -> None:
    with pytest.raises(BadProfile):
        dump_profile(replace(PROFILE, decode=(DecodeRow(1, 0, 0.1),)))
    with pytest.raises(BadProfile):
        dump_profile(replace(PROFILE, prefill=(PrefillRow(1, 0, float("nan")),)))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@given(path=st.integers(0, 10**6), value=VALUES)
def test_any_value_anywhere_is_read_or_refused(path: int, value: object) -> None:
    document = json.loads(dump_profile(PROFILE))
    node: Any = document
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = keys[path % len(keys)]
        path //= len(keys)
        if path == 0 or not isinstance(node[key], dict | list) or not node[key]:
            break
        node = node[key]
    node[key] = value
    try:
        read = parse_profile(json.dumps(document))
    except BadProfile:
        return
    assert parse_profile(dump_profile(read)) == parse_profile(dump_profile(parse_profile(dump_profile(read))))
