"""The settings of the services as options of ``triptych up``. Their own classes declare, describe and validate them."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from triptych.cli.outcome import CliError
from triptych.rpc.settings import InstanceSettings
from triptych.runtime.settings import ServiceSettings, SettingsError
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.gateway.settings import GatewaySettings
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.services.router.settings import RouterSettings
from triptych.services.text.settings import TextSettings

SERVICES: Mapping[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "router": RouterSettings,
    "pool_manager": PoolManagerSettings,
    "encoder": EncoderSettings,
    "text": TextSettings,
}
_SET_BY_THE_CLUSTER = frozenset(
    {
        *("host", "port", "admin_host", "admin_port", "allow_network", "allow_admin_network", "advertise"),
        *("tls_cert", "tls_key", "tls_ca", "tls_name", "rest_tls_cert", "rest_tls_key", "drain_s"),
        *("instance_id", "model", "model_id", "role", "switchable", "torch_threads", "mount_encoder"),
        *("router", "mount_router", "pool_manager", "instances", "instances_file", "instances_poll_s"),
        *("scaler", "autoscale", "switch_roles", "deployments", "redis", "redis_tls"),
    }
)
"""Settings that follow from the placement: no option has them."""
_OF_TEXT_ALONE = ("engine", "vllm_args")
"""Settings of encoders too, which have options of their own there: ``--encoder-engine``."""
USUAL = (
    *("engine", "vllm_args", "encoder_engine", "encoder_vllm_args", "device", "dtype", "resident"),
    *("embedding_files", "embedding_files_bytes", "kv_prefixes", "lora", "lora_root"),
    *("slo", "profiles", "delay_profile", "max_instances", "pool_sizes", "plan", "replan"),
)
"""Options that ``triptych up --help`` lists. ``python -m triptych.services.NAME --help`` lists the rest."""

Flags = Mapping[str, tuple[str, ...]]
"""Flags by service, each one word: ``--NAME=VALUE``, or ``--NAME`` and ``--no-NAME`` of a switch."""


class ServiceOption(NamedTuple):
    """An option of ``triptych up``."""

    name: str
    """The setting's own name."""
    services: tuple[str, ...]
    """Services whose processes get the option."""
    declared: FieldInfo

    @property
    def is_switch(self) -> bool:
        """Whether the option takes no value."""
        return self.declared.annotation is bool


@cache
def service_options() -> Mapping[str, ServiceOption]:
    """``NAME`` of each setting, for all processes that have it, and ``SERVICE_NAME`` for those of one service."""
    options: dict[str, ServiceOption] = {}
    for service, cls in SERVICES.items():
        for name, declared in cls.declared().items():
            if name in _SET_BY_THE_CLUSTER or (name in _OF_TEXT_ALONE and service != "text"):
                continue
            others = options[name].services if name in options else ()
            options[name] = ServiceOption(name, (*others, service), declared)
    for service, cls in SERVICES.items():
        for name in cls.declared().keys() - _SET_BY_THE_CLUSTER:
            options.setdefault(f"{service}_{name}", ServiceOption(name, (service,), cls.declared()[name]))
    return options


def parse(arguments: Sequence[str], others: Sequence[str] = ()) -> Flags:
    """The flags of each service on a command line of service options. ``others`` are known options, for suggestions.

    Raises CliError for what is no option, or lacks its value.
    """
    flags: dict[str, list[str]] = {service: [] for service in SERVICES}
    for _, option, flag in _read(arguments, others):
        for service in option.services:
            flags[service].append(flag)
    return {service: tuple(given) for service, given in flags.items()}


def by_name(arguments: Sequence[str], others: Sequence[str] = ()) -> dict[str, str]:
    """The values of service options by their names as they are written, a switch's ``yes`` or ``no``. Raises as ``parse`` does."""
    values: dict[str, str] = {}
    for name, option, flag in _read(arguments, others):
        own = name.removeprefix("no-") if option.is_switch and flag.startswith("--no-") else name
        values[own] = flag.partition("=")[2] or ("no" if flag.startswith("--no-") else "yes")
    return values


def _read(arguments: Sequence[str], others: Sequence[str]) -> Iterator[tuple[str, ServiceOption, str]]:
    """Each option: its name as it is written, without the dashes in front, what it is, and its flag."""
    following = iter(arguments)
    for argument in following:
        written, equals, value = argument.partition("=")
        name = written.removeprefix("--").replace("-", "_")
        option = service_options().get(name)
        negated = service_options().get(name.removeprefix("no_"))
        if argument.startswith("--no-") and negated is not None and negated.is_switch and not equals:
            option, flag = negated, f"--no-{_dashed(negated.name)}"
        elif not written.startswith("--") or option is None:
            raise CliError(f"{_unknown(written, others)} (--help lists options)", caller=True)
        elif option.is_switch and not equals:
            flag = f"--{_dashed(option.name)}"
        elif equals or (value := next(following, "")):
            flag = f"--{_dashed(option.name)}={value}"
        else:
            raise CliError(f"{written} needs a value", caller=True)
        yield _dashed(name), option, flag


def usual_rows() -> Iterator[tuple[str, str]]:
    """Option and description of what ``--help`` lists."""
    for name in USUAL:
        option = service_options()[name]
        flag = f"--{_dashed(name)}" + (f" / --no-{_dashed(name)}" if option.is_switch else "")
        yield flag, " ".join((option.declared.description or "").replace("``", "").split())


def without_instance_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """Flags of an encoder without those that it shares with the instance which it is mounted in."""
    shared = InstanceSettings.declared()
    names = [flag.removeprefix("--").removeprefix("no-").partition("=")[0].replace("-", "_") for flag in flags]
    return tuple(flag for flag, name in zip(flags, names, strict=True) if name not in shared)


def loaded(service: str, flags: Sequence[str], below: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The settings of a process with these flags, the environment, and ``below`` in place of defaults. Raises CliError."""
    try:
        return SERVICES[service].load(flags, below=below)
    except SettingsError as error:
        lines = str(error).splitlines()
        problems = [line.strip().removeprefix("settings: ").replace("Value error, ", "") for line in lines[1:] or lines]
        raise CliError(f"{service.replace('_', ' ')}: {'; '.join(problems)}", caller=True) from None


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _unknown(written: str, others: Sequence[str]) -> str:
    if not written.startswith("-"):
        return f"{written!r} is no option"
    close = get_close_matches(written, [*others, *(f"--{_dashed(name)}" for name in service_options())], n=1)
    return f"there is no option {written}" + (f"; did you mean {close[0]}?" if close else "")
