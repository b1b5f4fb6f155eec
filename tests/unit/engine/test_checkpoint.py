import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from triptych.domain.embedding import DType
from triptych.domain.instance import ModelInfo
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import DECIDING_FILES, open_checkpoint
from triptych.families.generic import ItemProcessing
from triptych.families.model_files import DEFAULT_TEMPLATE, TOOLS_TEMPLATE, BadModel, ModelFiles


@pytest.fixture
def copy(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "copy"))


def edit_config(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.slow
def test_the_model_is_described_without_torch(model_dir: Path) -> None:
    script = (
        "import sys, pathlib; from triptych.engine.checkpoint import DTYPES, open_checkpoint;"
        f"print(open_checkpoint(pathlib.Path({str(model_dir)!r})).revision());"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    checkpoint = open_checkpoint(model_dir)
    assert shown.stdout.strip() == checkpoint.revision()
    assert checkpoint.model_info(model_id="tiny", dtype=DType.F16) == ModelInfo(
        model_id="tiny", revision=checkpoint.revision(), dtype=DType.F16, hidden_size=64, context_length=512
    )


def test_equal_files_have_equal_revisions_in_any_directory(model_dir: Path, copy: Path) -> None:
    (copy / "README.md").write_text("decides nothing")
    assert open_checkpoint(copy).revision() == open_checkpoint(model_dir).revision()


@pytest.mark.parametrize("name", ["model.safetensors", *DECIDING_FILES])
def test_every_relevant_file_changes_the_revision(copy: Path, name: str) -> None:
    if name == TOOLS_TEMPLATE:
        (copy / DEFAULT_TEMPLATE).write_text("a template for tools needs one beside it")
    before = open_checkpoint(copy).revision()
    file = copy / name
    if name == "model.safetensors":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif file.exists():
        file.write_bytes(file.read_bytes() + b"\n")
    elif file.suffix == ".safetensors":
        save_file({"one": torch.ones(1)}, file)
    else:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"{}\n")
    assert open_checkpoint(copy).revision() != before


def test_weight_shards_are_found_by_their_index(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, copy / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy / "model.safetensors").unlink()
    assert [file.name for file in open_checkpoint(copy).weights] == ["a.safetensors", "b.safetensors"]
    (copy / "b.safetensors").unlink()
    with pytest.raises(BadModel, match=r"b\.safetensors is missing"):
        open_checkpoint(copy)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_a_broken_index_is_refused(copy: Path, index: str) -> None:
    (copy / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BadModel):
        open_checkpoint(copy)


def test_pickled_weights_are_refused(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(BadModel, match=r"pytorch_model\.bin is a pickle"):
        open_checkpoint(copy)


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(copy: Path, cut: int) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(BadModel, match="not a whole safetensors file"):
        open_checkpoint(copy)


@pytest.mark.parametrize("header", [b"[1]", b"{}x", b'{"a": {}}', b'{"a": {"data_offsets": ["x", "y"]}}', b"\xff\xff"])
def test_an_invalid_header_is_refused(copy: Path, header: bytes) -> None:
    (copy / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(BadModel, match="not a whole safetensors file"):
        open_checkpoint(copy)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")


def test_an_unknown_family_says_how_to_add_one(copy: Path) -> None:
    edit_config(copy, model_type="unheard_of")

    def process(files: ModelFiles) -> ItemProcessing:
        raise BadModel(f"there is no {files.model_type}")

    with pytest.raises(BadModel, match=r"unheard_of.*To add one.*Nor can its processor .*: there is no unheard_of"):
        open_checkpoint(copy, process)


@pytest.mark.parametrize("names", [None, [], [3]])
def test_a_configuration_without_architecture_is_refused(copy: Path, names: object) -> None:
    edit_config(copy, architectures=names)
    with pytest.raises(BadModel, match="no architecture"):
        _ = open_checkpoint(copy).architecture


def test_a_part_digest_is_of_the_part_alone(model_dir: Path, tmp_path: Path) -> None:
    def digests(name: str, change: Callable[[dict[str, Any]], object]) -> tuple[str, str]:
        directory = tmp_path / name
        shutil.copytree(model_dir, directory)
        config = json.loads((directory / "config.json").read_text())
        change(config)
        (directory / "config.json").write_text(json.dumps(config))
        checkpoint = open_checkpoint(directory)
        return checkpoint.part_digest(ModelPart.ENCODER), checkpoint.part_digest(ModelPart.DECODER)

    plain = digests("plain", lambda _: None)
    assert len(set(plain)) == 2
    assert (
        digests(
            "renamed", lambda config: config.update(transformers_version="9", architectures=config["architectures"])
        )
        == plain
    )
    longer = digests("longer", lambda config: config["text_config"].update(num_hidden_layers=9))
    assert longer[0] == plain[0]
    assert longer[1] != plain[1]
    other = digests("other", lambda config: config["vision_config"].update(num_hidden_layers=9))
    assert other[0] != plain[0]
    assert other[1] == plain[1]
