"""The command ``certs``."""

import importlib.util
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.folders import sole_writer
from triptych.cli.options import failures
from triptych.cli.outcome import CliError

commands = typer.Typer()

_DOMAIN = "triptych.internal"


@commands.command(
    epilog="Examples:\n\n- `triptych certs certs` makes an authority and the identities of a cluster, or those that are missing\n\n"
    "- `triptych certs certs --user alice` adds a user\n\n"
    "- `triptych certs certs --host gateway=chat.example.com` names a host of the REST port\n\n"
    "- `triptych certs certs --renew` replaces all certificates, `--renew-within 10` those with less than 10 days left\n\n"
    "- `triptych certs certs --new-authority`, then `--renew`, then `--drop-old-authorities` replaces the authority"
)
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files are.", file_okay=False)],
    name: Annotated[str, typer.Option(metavar="DOMAIN", help="--tls-name of the services.")] = _DOMAIN,
    user: Annotated[
        list[str] | None,
        typer.Option(
            help="A user of SDK and CLI, whom no service can be called as; may be repeated. By default *user*.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=HOST", help="A further name or address of a service; may be repeated."),
    ] = None,
    days: Annotated[float, typer.Option(min=0.001, max=3650, help="Validity of certificates.")] = 30,
    authority_days: Annotated[float, typer.Option(min=0.001, max=36500, help="Validity of a new authority.")] = 3650,
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace all certificates and keys, with their names.")
    ] = False,
    renew_within: Annotated[
        float | None, typer.Option(min=0, max=36500, metavar="DAYS", help="Replace those that expire within this time.")
    ] = None,
    new_authority: Annotated[
        bool, typer.Option("--new-authority", help="Make another authority; the old one is still trusted.")
    ] = False,
    drop_old_authorities: Annotated[
        bool, typer.Option("--drop-old-authorities", help="Trust only the authority that signs.")
    ] = False,
) -> None:
    """Make a local authority, and certificates for mutual TLS between services.

    What is there is kept unless it is to be renewed.
    """
    with failures():
        if importlib.util.find_spec("cryptography") is None:
            raise CliError("this needs cryptography: install Triptych's extra 'cli'", caller=True)
        if new_authority and (renew or renew_within is not None or drop_old_authorities):
            raise CliError("--new-authority comes first, and the rest once all services have read ca.pem", caller=True)
        hosts = tuple(_host(name) for name in host or ())
        _write(
            folder,
            name,
            hosts,
            user,
            lifetimes=(timedelta(days=days), timedelta(days=authority_days)),
            within=timedelta.max if renew else None if renew_within is None else timedelta(days=renew_within),
            new_authority=new_authority,
            drop=drop_old_authorities,
        )


def _host(given: str) -> tuple[str, str]:
    folder, separator, host = given.partition("=")
    if not separator:
        raise CliError(f"--host {given!r} is not NAME=HOST, as gateway=chat.example.com", caller=True)
    return folder, host


def _write(
    folder: Path,
    name: str,
    hosts: tuple[tuple[str, str], ...],
    users: list[str] | None,
    *,
    lifetimes: tuple[timedelta, timedelta],
    within: timedelta | None,
    new_authority: bool,
    drop: bool,
) -> None:
    from triptych.cli import authority as ca
    from triptych.runtime.tls import check_domain

    try:
        check_domain(name)
    except ValueError as error:
        raise CliError(str(error), caller=True) from None
    now = datetime.now(UTC).replace(microsecond=0)
    with sole_writer(folder):
        authority = ca.Authority.read(folder)
        wanted = ca.expected(name, hosts, users if users is not None else [] if authority else ["user"])
        issued = {identity.wanted.folder: identity for identity in ca.identities(folder)}
        if authority is None:
            if issued:
                raise CliError(f"{folder} has certificates, but no ca.pem and ca.key", caller=True)
            authority = ca.Authority.create(folder, lifetimes[1], now)
            typer.echo(f"made    {folder}/ca.pem, ca.key: until {_day(authority.ends)}")
        elif new_authority:
            living = [certificate for certificate in authority.trusted if certificate.not_valid_after_utc > now]
            authority = ca.Authority.create(folder, lifetimes[1], now, beside=living)
            typer.echo(f"made    {folder}/ca.pem, ca.key: until {_day(authority.ends)}; {len(living)} older trusted")
        elif drop:
            authority.trust_only_itself(issued.values())
        for identity in issued.values():
            extra = tuple(
                host for at, host in hosts if at == identity.wanted.folder and host not in identity.wanted.names
            )
            if not new_authority and (extra or (within is not None and identity.ends - now < within)):
                again = ca.Wanted(identity.wanted.folder, (*identity.wanted.names, *extra), identity.wanted.serves)
                ends = authority.issue(again, lifetimes[0], now)
                typer.echo(f"renewed {_shown(folder, again.folder, again.names)}: until {_day(ends)}")
            else:
                shared = authority.share(identity.wanted.folder)
                text = "; ca.pem replaced" if shared else ""
                typer.echo(
                    f"kept    {_shown(folder, identity.wanted.folder, identity.wanted.names)}: until {_day(identity.ends)}{text}"
                )
        for new in wanted:
            if new.folder not in issued:
                typer.echo(
                    f"made    {_shown(folder, new.folder, new.names)}: until {_day(authority.issue(new, lifetimes[0], now))}"
                )


def _shown(folder: Path, name: str, names: Sequence[str]) -> str:
    return f"{folder / name} ({', '.join(names) or 'a caller only'})"


def _day(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"
