"""Parts of a model, in numbers: parameters, floating-point operations and bytes, without any tensor.

Operations are those of products of matrices; a multiplication with its addition counts as two. Norms, activations and
additions of rows are left out, as profilers of operations leave them out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.domain.embedding import DType


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters: how many are ``stored``, and with how many of them a row is multiplied (``used``)."""

    stored: int = 0
    used: int = 0

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(self.stored + other.stored, self.used + other.used)

    def __mul__(self, times: int) -> "Weights":
        return Weights(self.stored * times, self.used * times)


def linear(inputs: int, outputs: int, *, bias: bool = True) -> Weights:
    """A linear layer."""
    return Weights(inputs * outputs + (outputs if bias else 0), inputs * outputs)


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations of a pass: products of rows with weights, and attention."""

    products: int = 0
    attention: int = 0
    """Products of queries with keys, and of their shares with values."""

    def __add__(self, other: "Work") -> "Work":
        return Work(self.products + other.products, self.attention + other.attention)

    def __mul__(self, times: int) -> "Work":
        return Work(self.products * times, self.attention * times)

    @property
    def flops(self) -> int:
        return self.products + self.attention


def work_of(rows: int, weights: Weights) -> Work:
    """Rows through linear layers."""
    return Work(2 * rows * weights.used)


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts in each layer: ``active`` of ``count`` for each row."""

    count: int
    active: int
    each: int
    """Parameters of one expert."""

    def stored(self, rows: int) -> float:
        """Parameters of the experts that ``rows`` rows need on average, if each chooses evenly."""
        return self.count * (1 - (1 - self.active / self.count) ** rows) * self.each


@dataclass(frozen=True, slots=True)
class Layers:
    """``count`` equal layers of a transformer."""

    count: int
    weights: Weights
    """Of one layer, with all of its experts; a row uses the active ones."""
    width: int
    """Query heads times head size."""
    kv_width: int
    """Key heads times head size."""
    window: int | None = None
    """Keys that a query sees at most, with its own."""
    experts: Experts | None = None

    def work(self, rows: int, pairs: int) -> Work:
        """``rows`` rows of which ``pairs`` pairs of a query and a key attend."""
        return Work(2 * self.count * self.weights.used * rows, 4 * self.count * self.width * pairs)

    def pairs(self, new: int, cached: int = 0) -> int:
        """Pairs of a query and a key of ``new`` positions after ``cached`` ones, each with itself and those before."""
        growing = new if self.window is None else min(new, max(0, self.window - cached))
        return growing * cached + growing * (growing + 1) // 2 + (new - growing) * (self.window or 0)

    def seen(self, context: int) -> int:
        """Keys that the last of ``context`` positions sees."""
        return context if self.window is None else min(context, self.window)

    def read_parameters(self, rows: int) -> float:
        """Parameters that a pass over ``rows`` rows reads."""
        if self.experts is None:
            return self.count * self.weights.stored
        always = self.weights.stored - self.experts.count * self.experts.each
        return self.count * (always + self.experts.stored(rows))


@dataclass(frozen=True, slots=True)
class CrossLayers:
    """Layers that attend to the states of items. ``layers`` are what text passes, in prompts with items only."""

    layers: Layers
    states: Weights
    """Keys and values of one layer, computed once of each state."""

    @property
    def parameters(self) -> int:
        return self.layers.count * (self.layers.weights.stored + self.states.stored)

    def work(self, rows: int, states: int, *, new_states: int = 0) -> Work:
        """``rows`` rows that attend to ``states`` states, and the keys and values of ``new_states`` states."""
        return self.layers.work(rows, rows * states) + work_of(new_states * self.layers.count, self.states)

    def state_nbytes(self, dtype: DType) -> int:
        """Bytes of keys and values of one state in all layers."""
        return 2 * dtype.itemsize * self.layers.count * self.layers.kv_width


@dataclass(frozen=True, slots=True)
class DecoderArchitecture:
    """A language model with its head."""

    layers: tuple[Layers, ...]
    embedding: Weights
    head: Weights
    """Stores nothing if it is tied to the embedding."""
    hidden_size: int
    context_length: int
    norm_parameters: int
    heads: int
    kv_heads: int
    row_values: int
    """Most values that a row has at once between two products."""
    cross: CrossLayers | None = None

    @property
    def parameters(self) -> int:
        count = self.embedding.stored + self.head.stored + self.norm_parameters
        count += sum(layers.count * layers.weights.stored for layers in self.layers)
        if self.cross is not None:
            count += self.cross.parameters
        return count

    @property
    def depth(self) -> int:
        """Layers with self-attention."""
        return sum(layers.count for layers in self.layers)

    def kv_token_nbytes(self, dtype: DType) -> int:
        """Bytes of keys and values of one position in all layers, also those with a window."""
        return 2 * dtype.itemsize * sum(layers.count * layers.kv_width for layers in self.layers)

    def prefill(self, new: int, cached: int = 0) -> Work:
        """``new`` tokens of one prompt after ``cached`` ones, and the logits of the last one."""
        work = work_of(1, self.head)
        for layers in self.layers:
            work += layers.work(new, layers.pairs(new, cached))
        return work

    def decode(self, batch: int, context: int) -> Work:
        """One token of each of ``batch`` sequences, which then have ``context`` tokens."""
        work = work_of(batch, self.head)
        for layers in self.layers:
            work += layers.work(batch, batch * layers.seen(context))
        return work

    def read_parameters(self, rows: int) -> float:
        """Parameters that a pass over ``rows`` rows of text reads; of the embedding it is as many rows."""
        head = self.head.used
        return head + rows * self.hidden_size + sum(layers.read_parameters(rows) for layers in self.layers)

    def read_kv_nbytes(self, context: int, dtype: DType) -> int:
        """Bytes of keys and values that one more token after ``context`` positions reads."""
        widths = (layers.count * layers.kv_width * layers.seen(context) for layers in self.layers)
        return 2 * dtype.itemsize * sum(widths)


@dataclass(frozen=True, slots=True)
class EncoderItem:
    """Cost of one item to an encoder."""

    tokens: int
    """Embedding tokens: the rows of its embedding."""
    nbytes: int
    """Bytes of its tensors."""
    work: Work
    rows: int
    """Rows of the encoder, about: as many as its products would be for if each used all parameters."""


@dataclass(frozen=True, slots=True)
class EncoderArchitecture:
    """A media encoder with its projector, and what some items cost it, of increasing size."""

    parameters: int
    depth: int
    """Layers that follow each other in a pass."""
    hidden_size: int
    row_values: int
    """Most values that a row has at once between two products."""
    items: Sequence[EncoderItem] = ()
