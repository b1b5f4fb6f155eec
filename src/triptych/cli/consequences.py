"""What no longer works without the last process of a kind."""

from collections.abc import Collection

from triptych.domain.stage import Stage

_WITHOUT = {
    Stage.DECODE: ("text instance", "all requests{} wait or fail"),
    Stage.ENCODE: ("encoder", "requests{} with images, video or audio wait or fail"),
}


def without(stages: Collection[Stage], of_model: str = "") -> tuple[str, str] | None:
    """The kind of instance that is not there when nothing serves these stages, and what happens to requests.

    ``of_model`` follows the word requests. None if it does not matter.
    """
    found = (told for stage, told in _WITHOUT.items() if stage in stages)
    return next(((kind, what.format(of_model)) for kind, what in found), None)
