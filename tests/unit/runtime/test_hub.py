"""A model is a local directory, or is downloaded from a hub without code and without pickles."""

import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from triptych import demo
from triptych.runtime.hub import WANTED, model_directory, served_name
from triptych.runtime.process import CannotStart


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Records the requests to a hub that has every model."""
    asked: list[dict[str, Any]] = []

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.append({"repository": repository, **options})
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    return asked


def test_a_directory_is_used_unchanged(tmp_path: Path, asked: list[dict[str, Any]]) -> None:
    (tmp_path / "model").mkdir()
    assert model_directory(tmp_path / "model") == tmp_path / "model"
    assert served_name(tmp_path / "model") == "model"
    assert asked == []


def test_a_link_is_served_under_its_own_name_and_a_cached_snapshot_under_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--owner--llava-1.5" / "snapshots" / "8c1f0b3e"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--gpt2" / "snapshots" / "5d").mkdir(parents=True)
    (tmp_path / "llava").symlink_to(snapshot)
    assert served_name(tmp_path / "llava") == "llava"
    assert served_name(Path(f"{tmp_path}/llava/")) == "llava"
    assert served_name(snapshot) == "owner/llava-1.5"
    assert served_name(tmp_path / "models--gpt2" / "snapshots" / "5d") == "gpt2"
    monkeypatch.chdir(tmp_path)
    assert (served_name(Path("./llava/")), served_name(Path())) == ("llava", tmp_path.name)
    monkeypatch.chdir(snapshot)
    assert (served_name(Path()), served_name(Path(".."))) == ("owner/llava-1.5", "snapshots")


def test_the_bundled_model_has_a_name(asked: list[dict[str, Any]]) -> None:
    assert (model_directory(Path("demo")), served_name(Path("demo"))) == (demo.MODEL_DIR, demo.MODEL_ID)
    assert asked == []


def test_a_repository_is_downloaded(tmp_path: Path, asked: list[dict[str, Any]]) -> None:
    assert model_directory(Path("owner/some-model_1.5")) == tmp_path
    model_directory(Path("owner/model@v1.0"), weights=False)
    assert [(asked_for["repository"], asked_for["revision"]) for asked_for in asked] == [
        ("owner/some-model_1.5", None),
        ("owner/model", "v1.0"),
    ]
    assert "*.safetensors" in asked[0]["allow_patterns"]
    assert not any(fnmatch("model.safetensors", pattern) for pattern in asked[1]["allow_patterns"])
    assert served_name(Path("owner/model@v1.0")) == "owner/model"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "modeling_x.py", "data.pkl", "x.safetensors.py"])
def test_neither_pickles_nor_code_are_downloaded(name: str) -> None:
    assert not any(fnmatch(name, pattern) for pattern in WANTED)


@pytest.mark.parametrize("name", ["nowhere", "/nowhere/at/all", "../up", "a/b/c", "owner/", "owner/na me"])
def test_an_invalid_model_name_is_one_clear_line(name: str, asked: list[dict[str, Any]]) -> None:
    with pytest.raises(CannotStart, match="is neither a local directory nor the name of a repository"):
        model_directory(Path(name))
    assert asked == []


def test_an_unreachable_hub_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> str:
        raise ConnectionError("https://secret.example/token=abc")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=unreachable))
    with pytest.raises(
        CannotStart, match="'owner/model' is not a local directory and cannot be downloaded from a hub: no hub answers"
    ) as said:
        model_directory(Path("owner/model"))
    assert "secret" not in str(said.value)
