"""Tests with vLLM as the engine, in its own environment: ``make test-vllm``. Elsewhere they are skipped, and said so."""

from importlib.util import find_spec
from pathlib import Path
from typing import Never

import pytest


class _NotTested(pytest.Module):
    """A test module that is not imported."""

    def collect(self) -> Never:
        pytest.skip("NOT TESTED: vLLM is not installed here; make test-vllm", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if find_spec("vllm") else _NotTested.from_parent(parent, path=module_path)
