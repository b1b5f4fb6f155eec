"""Settings: one frozen object per service, read at start from the command line, the environment and a file.

Precedence: command line > environment (``TRIPTYCH_<SERVICE>_...``) > file (``--config FILE``, TOML) > default. Unknown
keys are errors.

Each default exists once, in the class that owns it. A field of a settings class may be a *group*, the frozen dataclass
of the module that uses it. A file has a table per group, as ``--print-config`` shows. On the command line and in the
environment a group's settings go by their own names alone.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from ipaddress import ip_address
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, NoReturn, Self, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, Field, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as InvalidCommandLine

from triptych.files import BadFile, read_toml
from triptych.runtime.tls import TlsSettings

_PREFIX = "TRIPTYCH_"
_MAX_CONFIG_NBYTES = 1 << 20
_MAX_INTEGER = 2**63 - 1
_MAX_SECONDS = 1e8
"""Three years: longer times overflow the clocks of event loops."""


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


Strings = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""Strings; ``a,b,c`` in the environment and on the command line."""


def service_config(service: str) -> SettingsConfigDict:
    """The configuration of a service's settings class; ``service`` is its folder's name."""
    return SettingsConfigDict(
        env_prefix=f"{_PREFIX}{service.upper()}_",
        frozen=True,
        extra="forbid",
        cli_prog_name=f"triptych.services.{service}",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        use_attribute_docstrings=True,
        nested_model_default_partial_update=True,
        protected_namespaces=(),
    )


class SettingsError(ValueError):
    """The configuration is invalid; the message says, line by line, what to change."""


class ServiceSettings(BaseSettings):
    """Settings of every service. Subclasses set ``model_config = service_config(NAME)``."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    """Lowest severity to log: DEBUG, INFO, WARNING or ERROR."""
    drain_s: float = Field(default=10.0, ge=0, le=3600)
    """Longest time that requests may continue after SIGTERM, seconds."""
    log_format: str = Field(default="text", pattern="^(text|json)$")
    """Format of log lines: text or json."""
    admin_host: str = "127.0.0.1"
    """IP address of the admin port. It has neither encryption nor authentication: do not expose it."""
    admin_port: int = Field(default=0, ge=0, le=65535)
    """TCP port for /health, /ready and /metrics of this process alone; 0 opens none."""
    allow_admin_network: bool = False
    """Allow a non-loopback address of the admin port, on a network that only monitoring reaches."""
    loop_lag_warn_s: float = Field(default=0.25, gt=0, allow_inf_nan=False)
    """Log a warning when the event loop was blocked for this long."""
    tls: TlsSettings = TlsSettings()
    """Certificates for mutual TLS between services."""
    otlp_endpoint: str = Field(default="", pattern="^(https?://.+)?$")
    """OTLP collector (gRPC, http://HOST:4317) for request spans; empty disables tracing."""
    trace_sampling: float = Field(default=1.0, ge=0, le=1)
    """Share of the requests without a caller's trace of which spans are recorded. A trace that a caller has begun is
    recorded if the caller records it.
    """

    @model_validator(mode="after")
    def _numbers_are_usable(self) -> Self:
        for name, value in self.flat(type(self)).items():
            if isinstance(value, int) and value > _MAX_INTEGER:
                raise ValueError(f"{name} is {value}, must be at most {_MAX_INTEGER}")
            if isinstance(value, float) and not (
                isfinite(value) and (value <= _MAX_SECONDS or not name.endswith("_s"))
            ):
                raise ValueError(f"{name} is {value}, must be at most {_MAX_SECONDS:.0f}")
        return self

    @model_validator(mode="after")
    def _admin_network_is_meant(self) -> Self:
        if self.admin_port and not ip_address(self.admin_host).is_loopback and not self.allow_admin_network:
            raise ValueError(
                f"admin_host {self.admin_host} is not a loopback address, and the admin port has no authentication: "
                "set --allow-admin-network"
            )
        return self

    @property
    def metrics_address(self) -> str:
        """HOST:PORT of the admin port; empty without one."""
        host = f"[{self.admin_host}]" if ":" in self.admin_host else self.admin_host
        return f"{host}:{self.admin_port}" if self.admin_port else ""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """A settings object constructed directly has exactly its arguments; only ``load`` reads other sources."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)

    @classmethod
    def load(
        cls, argv: Sequence[str], environ: Mapping[str, str] | None = None, *, below: Mapping[str, Any] | None = None
    ) -> Self:
        """Read all sources and validate the result. Raises SettingsError; ``--help`` exits as usual.

        ``below`` are settings by their own names, in place of defaults. Every service has the flags ``--config FILE``
        and ``--print-config``.
        """
        environ = os.environ if environ is None else environ  # noqa: TID251 - the only place that reads the environment
        rest, config, print_config = _take_common_flags(argv)
        _refuse_unknown_environment(cls, environ)
        try:
            merged = _grouped(cls, below or {})
            for layer in (_read_file(cls, config), _read_environment(cls, environ), _read_command_line(cls, rest)):
                _merge(merged, layer)
            settings = cls(**merged)
        except ValidationError as error:
            raise SettingsError(_explain(error)) from None
        if print_config:
            settings.print_and_exit()
        return settings

    @classmethod
    def declared(cls) -> Mapping[str, FieldInfo]:
        """The settings of this class, those of its groups included, by their own names."""
        return _flat(cls)[0].model_fields

    def flat(self, cls: "type[ServiceSettings]") -> dict[str, Any]:
        """The settings that ``cls``, this class or one above it, declares, by their own names."""
        values, group_of = {}, _flat(cls)[1]
        for name in _flat(cls)[0].model_fields:
            values[name] = getattr(getattr(self, group_of[name]) if name in group_of else self, name)
        return values

    def print_and_exit(self) -> NoReturn:
        sys.stdout.write(self.model_dump_json(indent=2) + "\n")
        raise SystemExit(0)


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def load_or_exit(cls: type[SettingsT], argv: Sequence[str]) -> SettingsT:
    """``load`` for an entry point: an error is one message and exit status 2, without a traceback."""
    try:
        return cls.load(argv)
    except SettingsError as error:
        sys.stderr.write(f"{cls.model_config.get('cli_prog_name')}: {error}\n")
        raise SystemExit(2) from None


def _take_common_flags(argv: Sequence[str]) -> tuple[list[str], Path | None, bool]:
    rest: list[str] = []
    config: Path | None = None
    print_config = False
    pending = iter(argv)
    for argument in pending:
        if argument == "--print-config":
            print_config = True
        elif argument == "--config":
            value = next(pending, None)
            if value is None:
                raise SettingsError("--config needs a file")
            config = Path(value)
        elif argument.startswith("--config="):
            config = Path(argument.removeprefix("--config="))
        else:
            rest.append(argument)
    return rest, config, print_config


@cache
def _flat(cls: type[ServiceSettings]) -> tuple[type[BaseSettings], dict[str, str]]:
    """A class with the groups' settings as plain fields, and the group that each belongs to."""

    class Flat(BaseSettings):
        model_config = cls.model_config

    described = cls.model_json_schema().get("$defs", {})
    flat: dict[str, Any] = {}
    group_of: dict[str, str] = {}
    for name, info in cls.model_fields.items():
        group = info.annotation
        if not (isinstance(group, type) and is_dataclass(group)):
            flat[name] = (group, info)
            continue
        hints = get_type_hints(group)
        properties = described[group.__name__]["properties"]
        for field in fields(group):
            about = Field(default=field.default, description=properties[field.name].get("description"))
            hint = hints[field.name]
            flat[field.name] = (Annotated[hint, NoDecode] if get_origin(hint) is tuple else hint, about)
            group_of[field.name] = name
    return create_model(cls.__name__, __base__=Flat, **flat), group_of


def _grouped(cls: type[ServiceSettings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest settings, given by their own names, in their groups."""
    flat, group_of = _flat(cls)
    grouped: dict[str, Any] = {}
    for name, value in values.items():
        if name in group_of:
            several = get_origin(flat.model_fields[name].annotation) is tuple
            grouped.setdefault(group_of[name], {})[name] = _split(value) if several else value
        else:
            grouped[name] = value
    return grouped


def _merge(below: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Merge a layer of higher precedence into ``below``, setting by setting within groups."""
    for name, value in layer.items():
        old = below.get(name)
        below[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value


def _read_file(cls: type[ServiceSettings], path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = read_toml(path, _MAX_CONFIG_NBYTES)
    except BadFile as error:
        raise SettingsError(f"--config: {path} {error}") from None
    flat, group_of = _flat(cls)
    for name, value in values.items():
        if name in group_of and not isinstance(value, dict):
            raise SettingsError(f"--config: {name} belongs in the table [{group_of[name]}] of {path}")
        for setting, given in value.items() if isinstance(value, dict) else [(name, value)]:
            if isinstance(given, bool) and setting in flat.model_fields and not _is_switch(flat, setting):
                raise SettingsError(f"--config: {setting} is {str(given).lower()} in {path}, it is not a switch")
    return values


def _is_switch(settings: type[BaseSettings], name: str) -> bool:
    """Whether true and false are values of the setting. A validator would take them for 1 and 0."""
    annotation = settings.model_fields[name].annotation
    return annotation is bool or bool in get_args(annotation)


def _read_environment(cls: type[ServiceSettings], environ: Mapping[str, str]) -> dict[str, Any]:
    if not any(key.upper().startswith(_prefix(cls)) for key in environ):
        return {}
    source = EnvSettingsSource(_flat(cls)[0])
    source.env_vars = {key.lower(): value for key, value in environ.items()}
    return _grouped(cls, source())


def _read_command_line(cls: type[ServiceSettings], argv: list[str]) -> dict[str, Any]:
    flat = _flat(cls)[0]
    try:
        source = _command_line(flat)(args=argv)
    except InvalidCommandLine as error:
        flags = [f"--{name.replace('_', '-')}" for name in flat.model_fields]
        complaint = str(error).removeprefix("error parsing CLI: ")
        wrong = next(
            (flag for argument in argv if (flag := argument.split("=")[0]) in complaint and flag.startswith("-")), ""
        )
        raise SettingsError(f"{complaint}{_meant(wrong, flags)} (--help lists all settings)") from None
    return _grouped(cls, InitSettingsSource(flat, init_kwargs=source())())


@cache
def _command_line(flat: type[BaseSettings]) -> CliSettingsSource[Any]:
    """The parser of a class, which takes 20 ms to make: `triptych up` reads the settings of each process of a cluster."""
    return CliSettingsSource(flat, cli_exit_on_error=False)


def _prefix(cls: type[ServiceSettings]) -> str:
    return str(cls.model_config.get("env_prefix"))


def _refuse_unknown_environment(cls: type[ServiceSettings], environ: Mapping[str, str]) -> None:
    prefix = _prefix(cls)
    known = {prefix + name.upper() for name in _flat(cls)[0].model_fields}
    unknown = sorted(key for key in environ if key.upper().startswith(prefix) and key.upper() not in known)
    if unknown:
        meant = _meant(unknown[0].upper(), sorted(known))
        raise SettingsError(f"unknown environment variable {', '.join(unknown)}{meant}")


def _meant(wrong: str, known: Sequence[str]) -> str:
    close = get_close_matches(wrong, known, n=1)
    return f"; did you mean {close[0]}?" if close and wrong not in known else ""


def _explain(error: ValidationError) -> str:
    lines = (f"{'.'.join(map(str, detail['loc'])) or 'settings'}: {detail['msg']}" for detail in error.errors())
    return "invalid configuration\n  " + "\n  ".join(lines)
