"""What a request moves at every cut of a model, and which links bear it, as tables and as JSON."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isinf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from triptych.cli.outcome import CliError
from triptych.cli.profile.analytic import AnalyticModel
from triptych.cli.simulate.deployment import by_pool, degree_of
from triptych.domain.device import BadCatalogue, Catalogue, Link
from triptych.domain.embedding import DType, embedding_tokens
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.scaling import Kind
from triptych.domain.stage import ModelPart, Stage
from triptych.engine.checkpoint import DTYPES
from triptych.errors import InvalidMedia
from triptych.families.model_files import BadModel
from triptych.policy.roofline import DoesNotFit, Target, encode_pass, step_pass
from triptych.policy.transfer_analysis import LIGHT, Cut, Moved, MovedItem, Verdict, cuts, moved, needed_nbytes_per_s
from triptych.runtime.catalogue import at_hand, load_catalogue
from triptych.runtime.cores import usable_cores
from triptych.runtime.process import CannotStart
from triptych.sim.prepare import chat_request, media_infos
from triptych.workload.requests import Planned

KV_DTYPES: Mapping[str, DType] = {**DTYPES, "float8": DType.U8}
"""Data types of keys and values by their names; of ``float8`` only the size matters."""
_BYTES_PER_PIXEL = 0.3
"""Of compressed images and frames."""
_BYTES_PER_SAMPLE = 2
_PLAIN: Mapping[str, Any] = {"box": None, "pad_edge": False, "header_style": "dim", "padding": (0, 2, 0, 0)}


@dataclass(frozen=True, slots=True)
class Question:
    """Options of ``triptych plan transfers``. ``device`` and ``degree`` are of all roles, or ``ROLE=VALUE,...``."""

    model: str
    device: str
    degree: str
    dtype: str | None
    kv_dtype: str | None
    catalogue: Path | None
    request: Planned
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """A cut of the model, beside the stage and over each link."""

    cut: Cut
    stage_s: float
    target: Target
    over: Mapping[str, Moved]
    """By the names of links."""

    def links(self, verdict: Verdict) -> Sequence[str]:
        return [name for name, found in self.over.items() if found.verdict is verdict]

    def needed_nbytes_per_s(self, link: Link, share: float) -> float:
        return needed_nbytes_per_s(self.cut, self.stage_s, link.transfer_s, share)

    def document(self, fastest: Link) -> dict[str, Any]:
        return {
            "cut": self.cut.name,
            "nbytes": self.cut.nbytes,
            "parts": dict(self.cut.parts),
            "transfers": self.cut.transfers,
            "stage": self.cut.stage.value,
            "device": self.target.device.name,
            "stage_s": self.stage_s,
            "break_even_nbytes_per_s": _finite(self.needed_nbytes_per_s(fastest, 1.0)),
            "borne_from_nbytes_per_s": _finite(self.needed_nbytes_per_s(fastest, LIGHT)),
            "over": {
                name: {"seconds": found.seconds, "share": found.share, "verdict": found.verdict.value}
                for name, found in self.over.items()
            },
        }


def explain(question: Question, console: Console, *, as_json: bool) -> None:
    """Show the analysis. Raises CliError for a model, devices or items that cannot be used."""
    try:
        rows, links, notes = _analysed(question)
    except (BadCatalogue, BadModel, CannotStart, DoesNotFit) as error:
        raise CliError(str(error), caller=True) from None
    except InvalidMedia as error:
        raise CliError(error.message, caller=True) from None
    fastest = min(links.values(), key=lambda link: link.transfer_s)
    if as_json:
        given = {
            name: {
                "title": link.title,
                "nbytes_per_s": link.nbytes_per_s,
                "transfer_s": link.transfer_s,
                "source": link.source,
            }
            for name, link in links.items()
        }
        print(json.dumps({"cuts": [row.document(fastest) for row in rows], "links": given, "notes": notes}, indent=1))
        return
    _show(rows, links, fastest, console)
    for note in notes:
        console.print(note, soft_wrap=True, style="dim")


def _analysed(question: Question) -> tuple[list[Row], Mapping[str, Link], list[str]]:
    catalogue = load_catalogue(question.catalogue)
    model = AnalyticModel.named(question.model)
    targets = _targets(question, model, catalogue)
    dtype = targets[Stage.PREFILL].dtype
    kv_dtype = KV_DTYPES[question.kv_dtype] if question.kv_dtype else dtype
    family, decoder = model.architecture.family, model.architecture.decoder
    infos = _infos(question.request, model)
    items = [MovedItem.of(family, info, dtype) for info in infos]
    found = cuts(
        decoder,
        items,
        text_tokens=question.request.text_tokens,
        cached_tokens=question.cached_tokens,
        kv_dtype=kv_dtype,
    )
    positions = question.request.text_tokens + sum(item.positions for item in items)
    states = 0 if decoder.cross is None else sum(embedding_tokens((spec,)) for item in items for spec in item.tensors)
    new = max(1, positions - question.cached_tokens)
    prefill = step_pass(decoder, dtype, new=new, cached=positions - new, states=states, new_states=states)
    seconds = {
        Stage.ENCODE: _encode_s(model, infos, targets[Stage.ENCODE]),
        Stage.PREFILL: targets[Stage.PREFILL].pass_s(prefill),
    }
    rows = [
        Row(
            cut,
            seconds[cut.stage],
            targets[cut.stage],
            {name: moved(cut, link, seconds[cut.stage]) for name, link in catalogue.links.items()},
        )
        for cut in found
    ]
    return rows, catalogue.links, list(_notes(question, model, rows, positions))


def _targets(question: Question, model: AnalyticModel, catalogue: Catalogue) -> Mapping[Stage, Target]:
    """The devices that encode and that prefill, which hold their parts of the model. Raises BadCatalogue, CliError, DoesNotFit."""
    devices, degrees = by_pool(question.device, "--device"), by_pool(question.degree, "--tensor-parallel")

    def pool_of(stage: Stage) -> Kind:
        serving = [pool for pool in devices if pool.role.serves(stage)]
        if not serving:
            raise CliError(f"--device {question.device}: nothing would {stage.value}", caller=True)
        return min(serving, key=lambda pool: len(pool.role.stages))

    pools = {stage: pool_of(stage) for stage in (Stage.ENCODE, Stage.PREFILL)}
    of_stage = {stage: at_hand(catalogue.device(devices[pool]), len(usable_cores())) for stage, pool in pools.items()}
    usual = "float32" if of_stage[Stage.PREFILL].kind == "cpu" else model.dtype_name
    dtype = DTYPES[question.dtype or usual]
    targets = {
        stage: Target(of_stage[stage], dtype, degree_of(degrees.get(pool, "1"))) for stage, pool in pools.items()
    }
    model.memory(ModelPart.ENCODER, targets[Stage.ENCODE])
    model.memory(ModelPart.DECODER, targets[Stage.PREFILL])
    return targets


def _infos(request: Planned, model: AnalyticModel) -> tuple[MediaInfo, ...]:
    """The items of the request, with the bytes that compressed ones have. Raises InvalidMedia."""
    media = chat_request(0, request, "", timeout_s=1.0).media
    return tuple(
        replace(
            info,
            nbytes=round(
                info.samples_or_pixels * (_BYTES_PER_SAMPLE if info.modality is Modality.AUDIO else _BYTES_PER_PIXEL)
            ),
        )
        for info in media_infos(request, model.architecture.family, media)
    )


def _encode_s(model: AnalyticModel, infos: Sequence[MediaInfo], target: Target) -> float:
    """One pass of the encoder for items of each size."""
    family, dtype = model.architecture.family, target.dtype
    counts = Counter(embedding_tokens(family.outputs(info, dtype)) for info in infos)
    encoder = model.architecture.encoder(infos, dtype)
    return sum(target.pass_s(encode_pass(encoder, item, counts[item.tokens], dtype)) for item in encoder.items)


def _notes(question: Question, model: AnalyticModel, rows: Sequence[Row], positions: int) -> Iterator[str]:
    sizes = {row.cut.name: row.cut.nbytes for row in rows}
    if embeddings := sizes.get("embeddings"):
        yield f"keys and values are {sizes['keys and values'] / embeddings:.3g} times the embeddings, for {positions} tokens of prompt"
    if question.cached_tokens:
        yield f"{question.cached_tokens} of them are known to whoever reads keys and values"
    if "states of items" in rows[-1].cut.parts:
        yield "cross-attention: beside keys and values of the text the reader pulls the states of items, and computes theirs again"
    if model.is_config_alone:
        yield "there is only config.json: media are taken to be processed as the encoder needs it"
    yield (
        f"a link bears a cut if a transfer takes at most {LIGHT:.0%} of the stage's time for that request alone, without a batch; that is also "
        "how busy the link is while the stage never rests"
    )


def _show(rows: Sequence[Row], links: Mapping[str, Link], fastest: Link, console: Console) -> None:
    table = Table("cut", "bytes", "stage", "alone", "break-even", f"borne ({LIGHT:.0%}) from", **_PLAIN)
    for row in rows:
        parts = f" ({', '.join(f'{name} {_size(size)}' for name, size in row.cut.parts.items())})"
        table.add_row(
            row.cut.name,
            _size(row.cut.nbytes) + (parts if len(row.cut.parts) > 1 else ""),
            f"{row.cut.stage.value} on {row.target.degree} x {row.target.device.name}",
            _time(row.stage_s),
            *(_rate(row.needed_nbytes_per_s(fastest, share)) for share in (1.0, LIGHT)),
        )
    console.print(table)
    times = Table("link", "reached", *(row.cut.name for row in rows), **_PLAIN)
    for name, link in links.items():
        cells = (f"{_time(row.over[name].seconds)}, {row.over[name].share:.2%}" for row in rows)
        times.add_row(link.title, _rate(link.nbytes_per_s), *cells)
    console.print(times)
    for row in rows:
        said = [f"{verdict.value}: {', '.join(names)}" for verdict in Verdict if (names := row.links(verdict))]
        console.print(f"{row.cut.name}: {'; '.join(said)}", soft_wrap=True)


def _finite(rate: float) -> float | None:
    return None if isinf(rate) else rate


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes < 1e9 else f"{nbytes / 1e9:.3g} GB"


def _rate(nbytes_per_s: float) -> str:
    return "no rate" if isinf(nbytes_per_s) else f"{nbytes_per_s / 1e9:.3g} GB/s"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
