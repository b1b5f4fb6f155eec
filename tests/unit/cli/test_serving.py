"""``triptych serve``: what it starts on the devices of a machine. No machine with a GPU runs these: a stand-in is found."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import triptych
from tests.command_line import invoke
from triptych.cli import cluster, gpus, serving
from triptych.cli.gpus import FoundGpus, Gpu, find_gpus, read_answer
from triptych.cli.outcome import ClusterError
from triptych.demo import MODEL_DIR
from triptych.domain.embedding import DType
from triptych.domain.scaling import Kind
from triptych.domain.stage import Role
from triptych.engine.checkpoint import open_checkpoint
from triptych.integrations.vllm.release import MODEL_TYPES, SUPPORTED
from triptych.services.gateway.keys import key_digest, read_key_file

GB = 10**9
E, PD = Kind(Role.E, "gpu"), Kind(Role.PD, "gpu")


class Machine:
    """A stand-in for this machine's devices. It keeps what would be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found = FoundGpus()
        self.vllm: str | None = None
        self.started: dict[str, Any] = {}
        self.keys = ""
        monkeypatch.setattr(gpus, "find_gpus", lambda: self.found)
        monkeypatch.setattr(serving, "installed_vllm", lambda: self.vllm)
        monkeypatch.setattr(cluster, "LocalCluster", self._start)

    def has(self, count: int, nbytes: int = 80 * GB) -> None:
        self.found = FoundGpus(tuple(Gpu(str(number), "H200", nbytes) for number in range(count)))

    def __call__(self, *words: str) -> tuple[int, str]:
        """Runs a command. Returns its exit status, and all it printed as one line."""
        self.started = {}
        result = invoke(words)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, " ".join(result.output.split())

    def flags(self, service: str, name: str) -> str | None:
        """The value that processes of a service get."""
        given: Sequence[str] = self.started["options"][service]
        values = [flag.partition("=")[2] for flag in given if flag.partition("=")[0] == f"--{name}"]
        return values[-1] if values else None

    def _start(self, models: Any, **started: Any) -> None:
        self.started = {"models": models, **started}
        if (keys := self.flags("gateway", "keys")) is not None:
            self.keys = read_key_file(Path(keys))["serve"].sha256
        raise ClusterError("enough")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def weights_nbytes() -> int:
    return open_checkpoint(MODEL_DIR).weights_nbytes(DType.F16)


# --- devices ---------------------------------------------------------------------------------------------------------------


def test_a_system_without_drivers_has_no_gpu(tmp_path: Path) -> None:
    assert find_gpus(tmp_path) == FoundGpus()


@pytest.mark.parametrize(
    ("visible", "devices"), [(None, ["0", "1"]), ("3,GPU-5a", ["3", "GPU-5a"])], ids=["all", "some"]
)
def test_gpus_have_the_names_that_drivers_know(visible: str | None, devices: list[str]) -> None:
    answer = {"torch": "2.13.0+cu130", "builds": True, "gpus": [["H200", GB], ["H200", GB]]}
    found = read_answer(answer, visible, amd=False)
    assert [gpu.device for gpu in found.gpus] == devices
    assert not found.fault


@pytest.mark.parametrize(
    ("builds", "amd", "fault"),
    [
        (False, False, "is a build without CUDA: pip install --force-reinstall torch==2.13.0$"),
        (False, True, "is a build without ROCm: pip install .* --index-url https://download.pytorch.org/whl/rocm"),
        (True, False, "cannot use it: nvidia-smi says more$"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_a_fault_with_its_remedy(*, builds: bool, amd: bool, fault: str) -> None:
    answer = {"torch": "2.13.0+cpu", "builds": builds, "gpus": []}
    assert re.search(fault, read_answer(answer, None, amd=amd).fault)
    assert read_answer(answer, "", amd=amd) == FoundGpus(), "they are hidden on purpose"


# --- what is started -------------------------------------------------------------------------------------------------------


def test_a_cpu_computes_in_float32_with_our_engine(machine: Machine) -> None:
    machine.vllm = SUPPORTED
    _, said = machine("serve", "demo")
    assert machine.started["roles"] == "E:2,PD:1"
    for service in ("encoder", "text"):
        assert (machine.flags(service, "device"), machine.flags(service, "dtype")) == ("cpu", "float32")
    assert machine.flags("text", "engine") == "triptych"
    wanted = "cpu (no GPU was found), float32 (as usual on a CPU), engine triptych (there is no GPU)"
    assert f"triptych-demo: {wanted}" in said


def test_one_gpu_has_the_whole_model_in_the_checkpoints_data_type(machine: Machine) -> None:
    machine.has(1)
    _, said = machine("serve", "demo")
    assert (machine.started["roles"], machine.started["tiers"]) == ("EPD:1", {})
    assert (machine.flags("text", "device"), machine.flags("text", "dtype")) == ("cuda", "float16")
    assert machine.flags("text", "kv-cache-bytes") == str(int(0.75 * (72 * GB - weights_nbytes())))
    assert "1 x H200, float16 (that of the checkpoint), engine triptych (vLLM is not installed), roles EPD:1" in said
    machine("serve", "demo", "--dtype", "float32", "--kv-cache-bytes", "1000000", "--gpu-memory-utilization", "0.5")
    assert (machine.flags("text", "dtype"), machine.flags("text", "kv-cache-bytes")) == ("float32", "1000000")


@pytest.mark.parametrize(("count", "encoders"), [(2, 1), (4, 1), (8, 2)])
def test_of_several_gpus_one_encodes_for_three_that_generate(machine: Machine, count: int, encoders: int) -> None:
    machine.has(count)
    machine("serve", "demo")
    assert machine.started["roles"] == f"E@gpu:{encoders},PD@gpu:{count - encoders}"
    placed = machine.started["tiers"]
    assert [*placed[E].gpus, *placed[PD].gpus] == list(map(str, range(count)))


def test_roles_of_the_caller_get_gpus_of_their_own(machine: Machine) -> None:
    machine.has(4)
    machine("serve", "demo", "--roles", "E:1,P:1,D:2")
    assert machine.started["roles"] == "E@gpu:1,P@gpu:1,D@gpu:2"
    assert machine.started["tiers"][Kind(Role.D, "gpu")].gpus == ("2", "3")


def test_vllm_generates_where_it_is_installed(machine: Machine) -> None:
    machine.vllm = SUPPORTED
    machine.has(1)
    _, said = machine("serve", "demo", "--max-model-len", "4096")
    assert f"engine vllm (vLLM {SUPPORTED} serves this model)" in said
    assert machine.started["roles"] == "E:1,PD:1"
    assert machine.flags("text", "vllm-args") == "--max-model-len 4096 --gpu-memory-utilization 0.8"
    assert (machine.flags("text", "device"), machine.flags("encoder", "device")) == (None, "cuda")
    machine.has(4)
    machine("serve", "demo", "--tensor-parallel-size", "2", "--vllm-args=--enforce-eager")
    assert machine.started["tiers"][PD].gpus == ("2,3",)
    assert machine.started["tiers"][E].gpus == ("0", "1")
    assert machine.flags("text", "tensor-parallel") == "2"
    assert machine.flags("text", "vllm-args") == "--enforce-eager"


@pytest.mark.parametrize(
    ("words", "release", "reason"),
    [
        ((), "0.31.0", f"vLLM 0.31.0 is installed, {SUPPORTED} is supported"),
        (("--roles", "EPD:1"), SUPPORTED, "vLLM serves no role with E"),
        (("--max-sequences", "8"), SUPPORTED, "vLLM has no max_sequences"),
    ],
)
def test_our_engine_is_chosen_for_a_reason(machine: Machine, words: tuple[str, ...], release: str, reason: str) -> None:
    machine.vllm = release
    machine.has(1)
    _, said = machine("serve", "demo", *words)
    assert f"engine triptych ({reason})" in said
    assert machine.flags("text", "engine") == "triptych"


def test_options_are_named_as_those_of_vllm(machine: Machine) -> None:
    machine("serve", "demo", "--served-model-name", "digits", "--api-key", "secret", "--host", "0.0.0.0")
    assert [model.model_id for model in machine.started["models"]] == ["digits"]
    assert machine.keys == key_digest("secret").hex()
    assert machine.flags("gateway", "host") == "0.0.0.0"
    machine("serve", "demo", "--host", "127.0.0.1", "--port", "9000")
    assert (machine.flags("gateway", "host"), machine.started["port"]) == (None, 9000)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("no-such",), "'no-such' is neither a local directory nor the name of a repository"),
        (("demo", "--max-model-len", "9"), "--max-model-len: Triptych's engine has the context length"),
        (("demo", "--tensor-parallel-size", "2"), "--tensor-parallel-size: Triptych's engine runs on one device"),
        (("demo", "--engine=vllm", "--tensor-parallel-size=8"), "--tensor-parallel-size 8: there are 2 GPUs"),
        (("demo", "--roles", "E:1,PD:2"), "--roles needs 3 GPUs, there are 2"),
        (("demo", "--chat-template", "a"), "--chat-template: the router renders the template of the checkpoint"),
        (("demo", "--allowed-local-media-path", "/"), "--allowed-local-media-path: the gateway opens no local files"),
        (("demo", "--host", "0.0.0.0"), "gateway: .*allow.anyone"),
        (("demo", "--api-key", ""), "--api-key: the key is empty, or has spaces around it"),
        (("demo", "--api-key", "secret "), "--api-key: the key is empty, or has spaces around it"),
        (("demo", "--api-key", "secret", "--keys=keys.toml"), "--api-key and --keys: leave one out"),
        (("demo", "--roles", "E:1,PD:1", "--switch-roles"), "--switch-roles: on several GPUs"),
        (("demo", "--host", "10.0.0.1"), "--host 10.0.0.1: it is 127.0.0.1 or 0.0.0.0"),
        (("demo", "--device=cpu", "--gpu-memory-utilization=0.5"), "--gpu-memory-utilization: no GPU was found"),
        (("demo", "--dtype", "float8"), "dtype: Input should be .float32"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_starts(
    machine: Machine, words: tuple[str, ...], fault: str
) -> None:
    machine.has(2)
    code, said = machine("serve", *words)
    assert code in (1, 2)
    assert re.search(fault, said), said
    assert not machine.started


def test_a_gpu_that_cannot_be_used_is_no_cpu(machine: Machine) -> None:
    machine.found = FoundGpus(fault="there is a GPU, but torch is a build without CUDA: pip install torch")
    assert machine("serve", "demo") == (2, f"triptych: {machine.found.fault}; --device cpu does without")
    machine("serve", "demo", "--device", "cpu")
    assert machine.flags("text", "device") == "cpu"
    machine.found = FoundGpus()
    assert machine("serve", "demo", "--device", "cuda") == (2, "triptych: --device cuda: no GPU was found")


def test_a_model_that_does_not_fit_or_is_not_known_is_refused(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.has(1, nbytes=GB // 2)
    assert "of memory for its weights, of H200 can be used 0.5 GB" in machine("serve", "demo")[1]
    machine.found = FoundGpus()
    monkeypatch.setattr(serving, "available_nbytes", lambda: 1000)
    assert "GB of memory for its weights, this machine has free 0.0 GB" in machine("serve", "demo")[1]
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    code, said = machine("serve", str(tmp_path))
    assert (code, machine.started) == (2, {})
    assert tmp_path.name in said


def test_up_takes_auto_as_well_and_has_other_defaults(machine: Machine) -> None:
    machine.has(1)
    machine("up", "--device", "auto", "--dtype", "auto", "--engine", "auto", "--roles", "E:1,PD:1")
    assert (machine.flags("encoder", "device"), machine.flags("encoder", "dtype")) == ("cuda", "float16")
    machine("up")
    assert (machine.flags("text", "device"), machine.flags("text", "dtype")) == (None, None)


def test_auto_gives_vllm_the_types_whose_answers_are_tested() -> None:
    page = (Path(triptych.__file__).parents[2] / "docs" / "vllm.md").read_text()
    table = page.partition("tests/vllm/table.py")[2].partition("End of the table")[0]
    tested = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert tested
    assert tested - MODEL_TYPES == {"cohere_compass"}, "vLLM's own answers of it are not those of transformers"
