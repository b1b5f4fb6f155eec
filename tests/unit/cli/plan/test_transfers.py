"""``triptych plan transfers``, through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import invoke


def triptych(*arguments: str | Path | int, status: int = 0) -> str:
    result = invoke([str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


def analysed(*arguments: str | Path | int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(triptych("plan", "transfers", "--json", *arguments))
    return document


def test_tables_show_bytes_times_and_which_links_bear_a_cut(config: Path) -> None:
    said = triptych("plan", "transfers", "--model", config, "--device", "E=rtx-4090,PD=a100-80")
    words = " ".join(said.split())
    assert "embeddings 4.72 MB encode on 1 x rtx-4090" in words
    assert "keys and values 369 MB prefill on 1 x a100-80" in words
    assert "keys and values are 78.2 times the embeddings, for 704 tokens of prompt" in words
    assert "media: bears it: nvlink5" in words


def test_embeddings_pass_links_that_keys_and_values_do_not(config: Path) -> None:
    found = analysed("--model", config, "--device", "E=rtx-4090,PD=a100-80")
    of = {cut["cut"]: cut for cut in found["cuts"]}
    over = {name: {link: moved["verdict"] for link, moved in cut["over"].items()} for name, cut in of.items()}
    assert over["embeddings"]["pcie4"] == "bears it"
    assert over["keys and values"]["pcie4"] != "bears it"
    assert over["keys and values"]["ethernet10"] == "computing again is faster"
    assert of["embeddings"]["break_even_nbytes_per_s"] < of["keys and values"]["break_even_nbytes_per_s"]
    assert found["links"]["pcie4"]["nbytes_per_s"] == pytest.approx(25e9, rel=0.01), "HeteroServe, section 4.1"
    assert found["links"]["pcie4"]["source"]


def test_the_option_of_plan_is_the_same_command(config: Path) -> None:
    expected = triptych("plan", "transfers", "--json", "--model", config, "--device", "h100")
    assert triptych("plan", "--explain-transfer", "--json", "--model", config, "--device", "h100") == expected


def test_a_request_may_have_more_items_another_dtype_and_known_tokens(config: Path) -> None:
    one = {cut["cut"]: cut for cut in analysed("--model", config)["cuts"]}
    options = ("--images", 3, "--image-size", "640x480", "--kv-dtype", "float8", "--cached-tokens", 100)
    three = {cut["cut"]: cut for cut in analysed("--model", config, *options)["cuts"]}
    assert three["embeddings"]["transfers"] == 3
    assert three["embeddings"]["nbytes"] == 3 * one["embeddings"]["nbytes"]
    assert three["pixels"]["nbytes"] == 3 * 3 * 640 * 480
    token_nbytes = one["keys and values"]["nbytes"] / (576 + 128)
    assert three["keys and values"]["nbytes"] == (3 * 576 + 128 - 100) * token_nbytes / 2


def test_links_come_from_the_catalogue(config: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        '[link.carrier]\ntitle = "A pigeon"\ngb_per_s = 0.001\nreached = 0.5\ntransfer_s = 60\nsource = "RFC 1149"\n'
    )
    found = analysed("--model", config, "--catalogue", own)
    assert found["links"]["carrier"]["nbytes_per_s"] == 500_000
    assert {cut["over"]["carrier"]["verdict"] for cut in found["cuts"]} == {"computing again is faster"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "h1000"), "there is no device 'h1000'"),
        (("--device", "E=h100"), "nothing would prefill"),
        (("--device", "l4", "--dtype", "float32"), "--tensor-parallel 2 would fit"),
        (("--image-size", "3"), "is not a size"),
        (("--sounds", "1"), "the model takes images, not audio"),
    ],
)
def test_what_cannot_be_analysed_says_why(config: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in triptych("plan", "transfers", "--model", config, *arguments, status=2)
