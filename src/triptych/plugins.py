"""Entry points of installed packages: families, adapters, policies and transports that this package does not have.

A group per table: ``triptych.families`` and ``triptych.adapters`` by model_type, ``triptych.policies.SETTING`` and
``triptych.transports`` by name. Names of this package come first: a plug-in cannot replace them.
"""

from importlib.metadata import EntryPoint, entry_points


class BadPlugin(ValueError):
    """Plug-in that cannot be used; the message names its package."""


def plugin(group: str, name: str) -> object | None:
    """What an installed package offers in a group under this name, or None.

    Raises BadPlugin if two packages offer it, or if it cannot be loaded.
    """
    found = tuple(entry_points(group=group, name=name))
    if len(found) > 1:
        raise BadPlugin(f"{name!r} of {group} is offered by several packages: {', '.join(map(_package, found))}")
    if not found:
        return None
    try:
        loaded: object = found[0].load()
    except Exception as error:  # its code may raise anything
        raise BadPlugin(f"{name!r} of {group} in {_package(found[0])} cannot be loaded: {error}") from error
    return loaded


def plugin_names(group: str) -> tuple[str, ...]:
    """The names that installed packages offer in a group."""
    return tuple(sorted(entry_points(group=group).names))


def _package(point: EntryPoint) -> str:
    return f"{point.value} ({point.dist.name})" if point.dist is not None else point.value
