"""The mix of requests, counted in forms: routers report it, a plan says for which one it was made, and a pool manager compares both."""

from collections.abc import Iterable, Mapping

from triptych.domain.record import record

MAX_FORMS = 64
"""Forms of one report, and of the mix of a plan: the most frequent ones."""
FormKey = tuple[str, int, int, int, int]
"""Kind, and the bit lengths of items, pixels of an item, and tokens of the prompt and of the answer."""


@record
class Form:
    """Requests of one kind whose numbers are each within a factor of two. They count when they come and, in other forms with the length of
    their answer, when they end. All numbers are sums over both.
    """

    kind: str
    """``text``, ``image``, ``video`` or ``audio``: of the costliest item."""
    requests: int
    """That came."""
    answered: int
    """That were answered to the end."""
    items: int = 0
    pixels: int = 0
    """Of images and of all frames of videos; samples of sounds."""
    frames: int = 0
    """Of videos; 1 for each image, and for each sound."""
    seconds: float = 0.0
    """Of videos and sounds."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Of those that were answered."""

    @property
    def count(self) -> int:
        """How many its numbers are the sums of."""
        return self.requests + self.answered

    @property
    def key(self) -> FormKey:
        """The same for requests that count as one form."""
        return (
            self.kind,
            _bits(self.items, self.count),
            _bits(self.pixels, self.items),
            _bits(self.prompt_tokens, self.count),
            _bits(self.output_tokens, self.answered),
        )

    def after_answer(self, output_tokens: int) -> "Form":
        """How a request that came in this form counts again when it is answered."""
        return Form(
            self.kind, 0, 1, self.items, self.pixels, self.frames, self.seconds, self.prompt_tokens, output_tokens
        )

    def __add__(self, other: "Form") -> "Form":
        return Form(
            self.kind,
            self.requests + other.requests,
            self.answered + other.answered,
            self.items + other.items,
            self.pixels + other.pixels,
            self.frames + other.frames,
            self.seconds + other.seconds,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
        )


def _bits(total: int, of: int) -> int:
    """The bit length of a mean: 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7."""
    return (total // of).bit_length() if of else 0


@record
class Mix:
    """Forms of requests, the most frequent first."""

    forms: tuple[Form, ...] = ()

    @classmethod
    def of(cls, forms: Iterable[Form], most: int = MAX_FORMS) -> "Mix":
        """Equal forms are added up, and the ``most`` frequent are kept."""
        return cls(tuple(sorted(summed_forms(forms).values(), key=lambda form: (-form.count, form.key))[:most]))

    @property
    def requests(self) -> int:
        """That came."""
        return sum(form.requests for form in self.forms)


NO_REQUESTS = Mix()


def summed_forms(forms: Iterable[Form]) -> Mapping[FormKey, Form]:
    sums: dict[FormKey, Form] = {}
    for form in forms:
        key = form.key
        known = sums.get(key)
        sums[key] = form if known is None else known + form
    return sums
