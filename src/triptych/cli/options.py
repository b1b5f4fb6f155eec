"""Common options of the commands, and how a failure ends them. Nothing here takes time to import."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from triptych.cli.outcome import CliError

if TYPE_CHECKING:
    from triptych.cli.managers import Managers

T = TypeVar("T")

DEFAULT_PORT = 8000
DEFAULT_ROUTER_PORT = 50051
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
_INTERRUPTED = 130

Url = Annotated[str, typer.Option(envvar="TRIPTYCH_URL", help="Address of the gateway.")]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="TRIPTYCH_API_KEY", help="API key, if the gateway requires one.", show_default=False),
]


def managers(
    url: Url = DEFAULT_URL,
    pool_manager: Annotated[
        str | None,
        typer.Option(
            envvar="TRIPTYCH_POOL_MANAGER",
            metavar="HOST:PORT,...",
            help="Addresses of the pool managers; by default that of a local *triptych up*.",
            show_default=False,
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(envvar="TRIPTYCH_TLS_CERT", help="Own certificate (PEM), for a cluster that uses mutual TLS."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(envvar="TRIPTYCH_TLS_KEY", help="Key of the certificate (PEM).")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(envvar="TRIPTYCH_TLS_CA", help="Authority that signed the certificates (PEM).")
    ] = None,
    tls_name: Annotated[
        str,
        typer.Option(
            envvar="TRIPTYCH_TLS_NAME",
            metavar="DOMAIN",
            help="--tls-name of the services: the domain in their certificates; empty for their hosts.",
            show_default=False,
        ),
    ] = "",
) -> "Managers":
    """The pool managers of a command. Raises CliError for options that cannot be used."""
    from triptych.cli.managers import Managers
    from triptych.runtime.tls import TlsIdentity

    if tls_cert is None or tls_key is None or tls_ca is None:
        if tls_cert or tls_key or tls_ca or tls_name:
            raise CliError("--tls-cert, --tls-key and --tls-ca go together, and --tls-name with them", caller=True)
        return Managers(url, pool_manager)
    try:
        return Managers(url, pool_manager, TlsIdentity.load(tls_cert, tls_key, tls_ca, name=tls_name))
    except ValueError as error:
        raise CliError(str(error), caller=True) from None


def taking(parameter: str, make: Callable[..., Any], **defaults: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A decorator for commands: ``parameter`` becomes what ``make`` returns, whose options come after the command's own.

    ``defaults`` replace those of ``make``.
    """
    shared = [
        option.replace(default=defaults.get(option.name, option.default))
        for option in inspect.signature(make).parameters.values()
    ]

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        own = [option for option in inspect.signature(command).parameters.values() if option.name != parameter]

        def with_options(**given: Any) -> T:
            with failures():
                made = make(**{option.name: given.pop(option.name) for option in shared})
            return command(**{parameter: made}, **given)

        with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
        with_options.__annotations__ = {}
        with_options.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        return with_options

    return decorate


of_managers = taking("known", managers)
"""The decorator of commands whose parameter ``known`` is what ``managers`` returns."""


class failures:  # noqa: N801 - used as a statement
    """Ends the command with one line and the exit status of the error."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, CliError):
            _fail(str(error), 2 if error.caller else 1)
        if isinstance(error, ValueError):
            from triptych.workload.requests import WorkloadError

            if isinstance(error, WorkloadError):
                _fail(str(error), 2)
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            raise typer.Exit(_INTERRUPTED) from None


def run(work: Coroutine[Any, Any, T]) -> T:
    with failures():
        return asyncio.run(work)
    raise AssertionError("failures leave")


def _fail(message: str, code: int) -> NoReturn:
    from triptych.cli.show import plain_console

    plain_console(stderr=True).print(f"triptych: {message}", soft_wrap=True)
    raise typer.Exit(code)
