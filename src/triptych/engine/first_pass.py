"""The first passes of an engine, whichever it is: an instance is ready once every part that it serves has computed something.

An engine may load a model that it cannot run, and then ends, or fails, at its first request.
"""

from collections.abc import Iterator
from itertools import count

from triptych.domain.engine import EngineRequest
from triptych.domain.media import Modality
from triptych.domain.reasons import reason_of
from triptych.domain.sampling import SamplingParams
from triptych.families.base import Family, as_in_request
from triptych.families.model_files import BadModel
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.ports import EncoderEngine, Offload, PreparedT, TextEngine

_SIDE_PX = 64
_PROMPT_TOKENS = 2
_ANSWER_TOKENS = 2
"""Tokens of the first answer: one of a prefill, and one of a decode step."""
_MOST_STEPS = 100


async def encode_first(engine: EncoderEngine[PreparedT], family: Family, *, prepare: Offload, compute: Offload) -> None:
    """Encode a small item of each modality: an image, a clip. Frames of videos go the way of images. Raises BadModel."""
    for modality, media in _items(family):
        try:
            (info,) = as_in_request(family, [inspect_media(media, MediaLimits())])
            prepared = await prepare.run(engine.prepare, media, info)
            await compute.run(engine.encode, [prepared])
        except Exception as error:
            raise BadModel(
                f"the encoder cannot be run: its first {modality.value} fails: {reason_of(error)}"
            ) from error


def _items(family: Family) -> Iterator[tuple[Modality, bytes]]:
    from triptych.engine.probe_media import image, sound  # needs libraries that simulations do without

    if Modality.IMAGE in family.replacement_targets:
        yield Modality.IMAGE, image(_SIDE_PX)
    if Modality.AUDIO in family.replacement_targets:
        yield Modality.AUDIO, sound(1)


def answer_first(engine: TextEngine) -> None:
    """Compute a prompt and two tokens. Runs in the engine's thread. Raises BadModel."""
    try:
        tokens = _answered(engine)
    except Exception as error:
        raise BadModel(f"the language model cannot be run: its first prompt fails: {reason_of(error)}") from error
    if tokens != _ANSWER_TOKENS:
        raise BadModel(f"the language model cannot be run: its first answer has {tokens} tokens of {_ANSWER_TOKENS}")


def _answered(engine: TextEngine) -> int:
    """The number of tokens that it answers with."""
    token = next(token for token in count() if token not in engine.placeholder_ids)
    sampling = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True, seed=0)
    engine.add(EngineRequest("first", (token,) * _PROMPT_TOKENS, (), sampling))
    tokens = steps = 0
    while engine.has_work and steps < _MOST_STEPS:
        steps += 1
        for output in engine.step():
            if output.error is not None:
                raise output.error
            tokens += len(output.token_ids)
    return tokens
