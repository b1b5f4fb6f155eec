"""How a request is counted and judged: its class and load, what a missed objective is charged to, and how sure a measured
attainment is.
"""

import math
from collections.abc import Sequence

from triptych.domain.embedding import embedding_tokens
from triptych.domain.item_plan import ItemPlan
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.mix import Form
from triptych.domain.slo import TEXT, ChargedStage, Isolated, request_class
from triptych.domain.windows import ClassWindow

_COSTLIEST = (Modality.VIDEO, Modality.AUDIO, Modality.IMAGE)


def arrival(items: Sequence[ItemPlan], prompt_tokens: int) -> tuple[str, ClassWindow]:
    """The class of a prepared request, and a window with nothing but its arrival."""
    tokens: dict[Modality, int] = {}
    media_bytes = pixels = 0
    for item in items:
        info = item.info
        tokens[info.modality] = tokens.get(info.modality, 0) + embedding_tokens(item.tensors)
        media_bytes += info.nbytes
        pixels += info.samples_or_pixels
    counts = ClassWindow(
        arrivals=1,
        items=len(items),
        media_tokens=sum(tokens.values()),
        media_bytes=media_bytes,
        pixels=pixels,
        prompt_tokens=prompt_tokens,
    )
    return request_class(tokens), counts


def form_of(media: Sequence[MediaInfo], prompt_tokens: int) -> Form:
    """The form of a request that comes."""
    modalities = {info.modality for info in media}
    costliest = next((modality for modality in _COSTLIEST if modality in modalities), None)
    return Form(
        TEXT if costliest is None else costliest.value,
        1,
        0,
        len(media),
        sum([info.samples_or_pixels for info in media]),
        sum([info.frames for info in media]),
        sum([info.duration_s for info in media]),
        prompt_tokens,
    )


def charged(
    limit_s: float, isolated: Isolated | None, *, prepare_s: float, encode_s: float, prefill_s: float
) -> tuple[ChargedStage, ...]:
    """The stages that exceeded their share of a TTFT objective that was missed; empty if the shares are unknown.

    Shares are in proportion to the isolated latencies. As the shares add up to the limit, a missed limit means
    that at least one share was exceeded.
    """
    if isolated is None or isolated.ttft_s <= 0:
        return ()
    scale = limit_s / isolated.ttft_s
    parts = (
        (ChargedStage.PREPARE, prepare_s, isolated.prepare_s),
        (ChargedStage.ENCODE, encode_s, isolated.encode_s),
        (ChargedStage.PREFILL, prefill_s, isolated.prefill_s),
    )
    return tuple(stage for stage, took_s, alone_s in parts if took_s > scale * alone_s)


def wilson(part: int, whole: int, z: float = 1.645) -> tuple[float, float]:
    """The Wilson score interval of a share (Wilson 1927); ``z`` 1.645 gives 5 % on each side. (0, 1) for no data."""
    if whole <= 0:
        return 0.0, 1.0
    share, z2 = part / whole, z * z
    middle = share + z2 / (2 * whole)
    spread = z * math.sqrt((share * (1 - share) + z2 / (4 * whole)) / whole)
    scale = 1 + z2 / whole
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
