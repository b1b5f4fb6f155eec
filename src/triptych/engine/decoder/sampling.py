"""Sampling: the next tokens of all sequences of a step, in one batch on the device of their logits.

The order is vLLM's: grammar and forbidden ends, logit bias, penalties; then, unless a sequence is greedy, temperature,
min-p, top-k, top-p and the draw. Log-probabilities are those of the model's logits before any of these (vLLM's
``raw_logprobs``). Ties go to the lower token id, and one token always remains.

A draw depends on (seed, choice, position) alone, so neither batching nor preemption changes an answer.
``tests/unit/engine/decoder/reference_sampling.py`` is the reference, row by row. (A GPU adds weights in another order
than a CPU, so a draw at the boundary between two tokens may differ.)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from triptych.domain.engine import ScoredToken, Scores
from triptych.engine.decoder.sequence import EngineSequence
from triptych.engine.tensors import argmax

_CHUNK = 1 << 17
"""Float64 values computed at once on a CPU, so that they fit its cache."""
_SLACK = 1e-6
"""Relative margin by which a bound on logits is lowered, above its rounding error."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of one sequence, with log-probabilities if requested."""

    token_id: int
    scores: Scores | None = None


def sample(logits: torch.Tensor, sequences: Sequence[EngineSequence]) -> list[Sampled | Exception]:
    """Sample the next token of each sequence from its row of finite ``logits`` [n, vocabulary], float32, which are
    modified.

    Grammars advance by the sampled tokens. Where a sequence's grammar raises or allows no token, its exception is
    returned in place of a token.
    """
    scored = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
    raw = logits[torch.tensor(scored, device=logits.device)] if scored else logits
    failures = _adjust(logits, sequences)
    tokens = argmax(logits)
    random = [
        row for row, sequence in enumerate(sequences) if sequence.sampling.temperature > 0 and row not in failures
    ]
    if random:
        for row, token in zip(random, _draw(_rows(logits, random), [sequences[row] for row in random]), strict=True):
            tokens[row] = token
    scores = dict(zip(scored, _scores(raw, scored, tokens, sequences), strict=True)) if scored else {}
    for row, sequence in enumerate(sequences):
        if sequence.grammar is not None and row not in failures:
            try:
                sequence.grammar.accept(tokens[row])
            except Exception as error:  # noqa: BLE001 - returned: it concerns one sequence
                failures[row] = error
    return [failures[row] if row in failures else Sampled(token, scores.get(row)) for row, token in enumerate(tokens)]


# --- logits processors ------------------------------------------------------------------------------------------------


def _adjust(logits: torch.Tensor, sequences: Sequence[EngineSequence]) -> dict[int, Exception]:
    """Apply grammar masks, early ends, bias and penalties in place; returns grammar failures by row."""
    failures: dict[int, Exception] = {}
    if not any(sequence.is_adjusted for sequence in sequences):
        return failures
    _mask(logits, sequences, failures)
    _forbid_ends(logits, sequences)
    bias, repetition, counts = _Cells(), _Cells(), _Cells()
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        if sampling.logit_bias:
            bias.add(
                row,
                [token_id for token_id, _ in sampling.logit_bias],
                np.array([value for _, value in sampling.logit_bias], dtype=np.float32),
            )
        answer = np.empty(0, dtype=np.intp)
        if sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty:
            answer = np.array(sequence.answer, dtype=np.intp)
        if sampling.repetition_penalty != 1:
            repetition.add(row, np.concatenate((sequence.prompt_ids, answer)), np.float32(sampling.repetition_penalty))
        if sampling.frequency_penalty or sampling.presence_penalty:
            present, times = np.unique(answer, return_counts=True)
            penalty = sampling.frequency_penalty * times + sampling.presence_penalty
            counts.add(row, present, penalty.astype(np.float32))
    bias.change(logits, torch.add)
    repetition.change(logits, lambda now, penalty: torch.where(now > 0, now / penalty, now * penalty))
    counts.change(logits, torch.sub)
    return failures


class _Cells:
    """Values for some tokens of some rows, applied to logits at once."""

    def __init__(self) -> None:
        self._rows: list[npt.NDArray[np.intp]] = []
        self._token_ids: list[npt.NDArray[np.intp]] = []
        self._values: list[npt.NDArray[np.float32]] = []

    def add(self, row: int, token_ids: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """``values`` is one per token, or one for all."""
        columns = np.asarray(token_ids, dtype=np.intp)
        self._rows.append(np.full(len(columns), row, dtype=np.intp))
        self._token_ids.append(columns)
        self._values.append(np.broadcast_to(np.asarray(values, dtype=np.float32), len(columns)))

    def change(self, logits: torch.Tensor, how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        if self._rows:
            cells = [
                torch.from_numpy(np.concatenate(parts)).to(logits.device, non_blocking=True)
                for parts in (self._rows, self._token_ids)
            ]
            values = torch.from_numpy(np.concatenate(self._values)).to(logits.device, non_blocking=True)
            at = (cells[0], cells[1])
            logits[at] = how(logits[at], values)


def _mask(logits: torch.Tensor, sequences: Sequence[EngineSequence], failures: dict[int, Exception]) -> None:
    """Allow only what grammars allow. A mask has a bit per token, least significant first; missing bits are 0."""
    vocabulary = logits.shape[1]
    width = -(-vocabulary // 8)
    masks: dict[int, bytes] = {}
    for row, sequence in enumerate(sequences):
        if sequence.grammar is not None:
            try:
                masks[row] = sequence.grammar.allowed()[:width].ljust(width, b"\0")
            except Exception as error:  # noqa: BLE001 - returned: it concerns one sequence
                failures[row] = error
    if not masks:
        return
    rows = torch.tensor(list(masks), device=logits.device)
    packed = torch.frombuffer(bytearray().join(masks.values()), dtype=torch.uint8).view(len(masks), width, 1)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (packed.to(logits.device) >> shifts & 1).flatten(1)[:, :vocabulary].bool()
    logits[rows] = logits[rows].masked_fill_(~allowed, -torch.inf)
    for row, possible in zip(masks, allowed.any(-1).tolist(), strict=True):
        if not possible:
            failures[row] = ValueError("the grammar leaves no token")


def _forbid_ends(logits: torch.Tensor, sequences: Sequence[EngineSequence]) -> None:
    """Forbid end tokens before ``min_tokens``, unless nothing else is allowed."""
    for row, sequence in enumerate(sequences):
        if sequence.is_early:
            ends = torch.tensor(sorted(sequence.end_ids), device=logits.device)
            before = logits[row, ends]
            logits[row, ends] = -torch.inf
            nothing_else = sequence.grammar is not None or len(ends) == logits.shape[1]
            if nothing_else and not logits[row].isfinite().any():
                logits[row, ends] = before


# --- the draw ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Draws:
    """Sampling parameters of some rows, each [n, 1] in float64."""

    highest: torch.Tensor
    temperature: torch.Tensor
    min_p: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    """int64; the vocabulary's size without top-k."""
    uniform: torch.Tensor

    def rows(self, index: Any) -> "_Draws":
        return _Draws(
            self.highest[index],
            self.temperature[index],
            self.min_p[index],
            self.top_p[index],
            self.top_k[index],
            self.uniform[index],
        )

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        """Unnormalized probabilities of some logits of these rows; the likeliest token has 1."""
        return logits.double().sub_(self.highest).div_(self.temperature).exp_()

    def pick(self, weights: torch.Tensor) -> torch.Tensor:
        """[n, 1] indices of ``weights`` [n, m], each with the probability of its weight."""
        cumulative = weights.cumsum(-1)
        total = cumulative[:, -1:].contiguous()
        at = torch.searchsorted(cumulative, self.uniform * total, right=True)
        return torch.minimum(at, torch.searchsorted(cumulative, total))  # in case u * total is rounded up to the total


def _draw(logits: torch.Tensor, sequences: Sequence[EngineSequence]) -> list[int]:
    """Draw a token for each row, by its temperature, min-p, top-k, top-p, seed and position."""
    vocabulary, device = logits.shape[1], logits.device
    drawn = uniform(
        [sequence.sampling.seed or 0 for sequence in sequences],
        [sequence.choice for sequence in sequences],
        [sequence.length for sequence in sequences],
    )
    numbers = [
        (sequence.sampling.temperature, sequence.sampling.min_p, sequence.sampling.top_p, at)
        for sequence, at in zip(sequences, drawn.tolist(), strict=True)
    ]
    temperature, min_p, top_p, chances = torch.tensor(numbers, dtype=torch.float64).to(device)[:, :, None].unbind(1)
    top_k = [
        sequence.sampling.top_k if 0 < sequence.sampling.top_k < vocabulary else vocabulary for sequence in sequences
    ]
    highest = logits.amax(-1, keepdim=True).double()
    draws = _Draws(highest, temperature, min_p, top_p, torch.tensor(top_k, device=device)[:, None], chances)
    is_filtered = [m > 0 or p < 1 or k < vocabulary for (_, m, p, _), k in zip(numbers, top_k, strict=True)]
    tokens = torch.empty(len(logits), dtype=torch.long, device=device)
    for draw, wanted in ((_draw_from_all, False), (_draw_filtered, True)):
        rows = [row for row, filtered in enumerate(is_filtered) if filtered == wanted]
        if len(rows) == len(logits):
            return draw(logits, draws).tolist()
        if rows:
            index = torch.tensor(rows, device=device)
            tokens[index] = draw(logits[index], draws.rows(index))
    return tokens.tolist()


def _draw_from_all(logits: torch.Tensor, draws: _Draws) -> torch.Tensor:
    """Tokens [n], drawn from the whole vocabulary."""
    chunks = ((draws.rows(part), logits[part]) for part in _chunks(logits))
    return torch.cat([some.pick(some.weights(part)) for some, part in chunks])[:, 0]


def _draw_filtered(logits: torch.Tensor, draws: _Draws) -> torch.Tensor:
    """Tokens [n], drawn from what min-p, top-k and top-p leave.

    Instead of sorting the vocabulary, a lower bound on the remaining logits selects candidates: the largest that top-k
    or min-p allows, else that below which all tokens together have less than 1 - ``top_p`` of the weight.
    """
    vocabulary = logits.shape[1]
    total = torch.full_like(draws.highest, torch.nan)
    bound = draws.highest + draws.temperature * draws.min_p.log()
    limited = (draws.top_k < vocabulary)[:, 0].nonzero()[:, 0]
    if len(limited):
        top_k = draws.top_k[limited]
        best = logits[limited].topk(int(top_k.amax())).values.double()
        bound[limited] = bound[limited].maximum(best.gather(1, top_k - 1))
    open_ended = bound.isneginf()[:, 0].nonzero()[:, 0]
    if len(open_ended):
        some, rows = draws.rows(open_ended), logits[open_ended]
        sums = [some.rows(part).weights(rows[part]).sum(-1, keepdim=True) for part in _chunks(rows)]
        total[open_ended] = torch.cat(sums)
        outside = (1 - some.top_p) * total[open_ended] / vocabulary
        bound[open_ended] = some.highest + some.temperature * outside.log()
    candidates = _at_least(logits, (bound - bound.abs() * _SLACK).float())
    tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    for rows in candidates.alike(1 if logits.device.type == "cpu" else len(logits)):
        ids = candidates.padded(rows)
        values = logits[rows[:, None], ids.clamp(min=0)].masked_fill_(ids < 0, -torch.inf)
        tokens[rows] = _draw_ranked(values, ids, draws.rows(rows), total[rows])
    return tokens


def _draw_ranked(values: torch.Tensor, ids: torch.Tensor, draws: _Draws, total: torch.Tensor) -> torch.Tensor:
    """Tokens [n], drawn from candidates [n, m], given as logits and ids in ascending order.

    ``total`` is the weight that ``top_p`` is a fraction of; NaN means that of the candidates left by min-p and top-k.
    """
    values, order = values.sort(dim=-1, descending=True, stable=True)
    weights = draws.weights(values)
    weights.masked_fill_(weights < draws.min_p, 0)
    weights.masked_fill_(torch.arange(ids.shape[1], device=ids.device) >= draws.top_k, 0)
    total = torch.where(total.isnan(), weights.sum(-1, keepdim=True), total)
    before = weights.cumsum(-1)[:, :-1]
    weights[:, 1:].masked_fill_((before >= draws.top_p * total) & (draws.top_p < 1), 0)
    by_id = torch.zeros_like(weights).scatter_(1, order, weights)
    return ids.gather(1, draws.pick(by_id))[:, 0]


def uniform(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) from (seed, choice, position): the first of numpy's ``Philox`` with that key and counter."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    word = (1 << 64) - 1
    key = np.array([[seed & word for seed in seeds], [choice & word for choice in choices]], dtype=np.uint64)
    step = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
    factors = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
    factors_low, factors_high = factors & low, factors >> half
    even = np.zeros_like(key)  # words 0 and 2 of the counter; 1 and 3 are ``odd``
    even[0] = 1
    odd = np.zeros_like(key)
    odd[0] = [position & word for position in positions]
    for _ in range(10):
        even_low, even_high = even & low, even >> half
        middle = even_high * factors_low + (even_low * factors_low >> half)
        carried = even_low * factors_high + (middle & low)
        high = even_high * factors_high + (middle >> half) + (carried >> half)
        even, odd = (high[::-1] ^ odd ^ key), (even * factors)[::-1]
        key = key + step
    numbers: npt.NDArray[np.float64] = (even[0] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


# --- log-probabilities ------------------------------------------------------------------------------------------------


def _scores(
    raw: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], sequences: Sequence[EngineSequence]
) -> list[Scores]:
    """Log-softmax of ``raw`` [n, vocabulary], the logits of ``rows``, for the sampled tokens and the likeliest."""
    asked = [sequences[row].sampling.logprobs or 0 for row in rows]
    highest = raw.amax(-1, keepdim=True).double()
    sums = [(raw[part].double() - highest[part]).exp_().sum(-1, keepdim=True) for part in _chunks(raw)]
    totals = torch.cat(sums).log_()
    totals += highest
    top_ids, top = _best(raw, max(asked), totals)
    chosen = torch.tensor([tokens[row] for row in rows], device=raw.device)
    logprobs = (raw.gather(1, chosen[:, None]).double() - totals)[:, 0].tolist()
    return [
        Scores(
            ScoredToken(tokens[row], logprobs[at]),
            tuple(map(ScoredToken, top_ids[at][: asked[at]], top[at][: asked[at]])),
        )
        for at, row in enumerate(rows)
    ]


def _best(raw: torch.Tensor, count: int, totals: torch.Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and log-probabilities of the ``count`` likeliest of each row, best first."""
    count = min(count, raw.shape[1])
    if not count:
        return [[]] * len(raw), [[]] * len(raw)
    candidates = _at_least(raw, raw.topk(count).values[:, -1:])
    ids = candidates.padded(torch.arange(len(raw), device=raw.device))
    values = raw.gather(1, ids.clamp(min=0)).masked_fill_(ids < 0, -torch.inf)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order)[:, :count].tolist(), (values[:, :count].double() - totals).tolist()


# --- rows and columns -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Candidates of each row: some columns, ascending and concatenated in ``columns``. Row i starts at ``starts[i]``."""

    columns: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """The columns of some rows, [n, most columns], padded with -1."""
        counts = self.counts[rows, None]
        offsets = torch.arange(int(counts.amax()), device=rows.device)
        at = (self.starts[rows, None] + offsets).clamp_(max=len(self.columns) - 1)
        return self.columns[at].masked_fill_(offsets >= counts, -1)

    def alike(self, chunks: int) -> Iterator[torch.Tensor]:
        """Batches of rows with similar counts, which need little padding, of at most ``chunks`` chunks of values."""
        counts, rows = self.counts.sort()
        widths = counts.tolist()
        begin = 0
        for end in range(1, len(widths) + 1):
            if end == len(widths) or (end + 1 - begin) * widths[end] > chunks * _CHUNK:
                yield rows[begin:end]
                begin = end


def _at_least(values: torch.Tensor, bound: torch.Tensor) -> _Candidates:
    """The columns of each row of ``values`` [n, m] with at least ``bound`` [n, 1]."""
    mask = (values >= bound).flatten()
    # numpy is much faster than torch here on a CPU.
    flat = torch.from_numpy(np.flatnonzero(mask.numpy())) if mask.device.type == "cpu" else mask.nonzero()[:, 0]
    counts = torch.bincount(flat // values.shape[1], minlength=len(values))
    return _Candidates(flat % values.shape[1], counts.cumsum(0) - counts, counts)


def _chunks(values: torch.Tensor) -> Iterator[slice]:
    """Slices of rows computed at a time: as many as fit a CPU's cache, all on a GPU."""
    size = max(1, _CHUNK // values.shape[1]) if values.device.type == "cpu" else len(values)
    for begin in range(0, len(values), size):
        yield slice(begin, begin + size)


def _rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
