"""Cost of encoding for decodes on the same device: scheduled in turns, and on arrival.

One process, one compute thread, a random LLaVA, real services (no network, no router), one run:

- ``alone``: answers are decoded, with an occasional prompt; nothing is encoded.
- ``whenever``: also encodes images as fast as possible, by an encoder with its own loop on the same thread; batches and
  engine steps run in order of arrival.
- ``turns``: the same, as ``--role EPD`` does it: decodes first, then prompts, a batch of images only when no prompt can be
  computed, and no more of either than ``--tpot-slo-s`` allows (HydraInfer, algorithm 1).

The systems alternate within each round, each with the token budget for the objective. The objective is the time of a full
decode step and two images here, measured at start.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
import transformers as untyped_transformers
from PIL import Image

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from triptych.demo import MODEL_DIR
from triptych.domain.encoding import EncodeRequest
from triptych.domain.generation import TextRequest, TokenChunk
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import Role
from triptych.engine.checkpoint import open_checkpoint
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.engine.encoder import TransformersEncoderEngine
from triptych.engine.timing import fastest_s
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.rpc.data_plane import ProcessDataPlane
from triptych.runtime.world import real_world
from triptych.services.encoder import engines as encoder_engines
from triptych.services.encoder.build import build as build_encoder
from triptych.services.encoder.service import EncoderService
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.text import engines as text_engines
from triptych.services.text.app import app as text_app
from triptych.services.text.build import build
from triptych.services.text.service import TextService
from triptych.services.text.settings import TextSettings
from triptych.transport.options import TransferOptions
from triptych.workload.report import percentile

transformers: Any = untyped_transformers
MIB = 1 << 20
IMAGE_PX, PATCH_PX = 224, 14
IMAGE_TOKENS = (IMAGE_PX // PATCH_PX) ** 2
VOCABULARY = 512
SYSTEMS = ("alone", "whenever", "turns")


@dataclass(frozen=True, slots=True)
class Load:
    answers: int
    """Concurrent answers."""
    tokens: int
    """Tokens per answer."""
    callers: int
    """Callers that encode one image after the other."""
    prompt_tokens: int
    prompt_every_s: float


@dataclass(slots=True)
class Seen:
    """Results of one round of one system."""

    gaps_s: list[float] = field(default_factory=list)
    """Gaps between two tokens of an answer."""
    first_s: list[float] = field(default_factory=list)
    """Times to first token."""
    images: int = 0
    took_s: float = 0.0


def make(directory: Path, layers: int, hidden: int) -> None:
    """A random LLaVA with a vision encoder and a language model of one size, and the demo model's tokenizer."""
    torch.manual_seed(0)
    size = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 64}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            **size, intermediate_size=4 * hidden, image_size=IMAGE_PX, patch_size=PATCH_PX
        ),
        text_config=transformers.LlamaConfig(
            **size,
            num_key_value_heads=hidden // 64,
            intermediate_size=3 * hidden,
            vocab_size=VOCABULARY,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        ),
        image_token_id=4,
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        text = (MODEL_DIR / name).read_text()
        (directory / name).write_text(
            text.replace('"height": 56', f'"height": {IMAGE_PX}').replace('"width": 56', f'"width": {IMAGE_PX}')
        )


def objective_s(model: Path, settings: TextSettings) -> tuple[float, float, float]:
    """Time of a full decode step and two images together, and of each part."""
    checkpoint = open_checkpoint(model)
    encoder = TransformersEncoderEngine(checkpoint, model_id="random", compute=settings.compute)
    text = TransformersTextEngine(
        checkpoint,
        replace(settings.engine, token_budget=settings.engine.max_sequences, tpot_slo_s=None),
        model_id="random",
        max_embedding_bytes=settings.tensor_cache.max_embedding_bytes,
        compute=settings.compute,
    )
    media = picture(random.Random(0))
    item = encoder.prepare(media, inspect_media(media, MediaLimits()))
    encoder.encode([item])
    decode_s, two_s = text.full_decode_s(), fastest_s(lambda: encoder.encode([item] * 2))
    return 1.1 * (decode_s + two_s), decode_s, two_s


def picture(rng: random.Random) -> bytes:
    """A unique image."""
    out = BytesIO()
    Image.frombytes("RGB", (16, 16), rng.randbytes(768)).resize((IMAGE_PX, IMAGE_PX)).save(out, "JPEG")
    return out.getvalue()


@asynccontextmanager
async def in_turns(settings: TextSettings) -> AsyncGenerator[tuple[TextService, EncoderService[Any]]]:
    async with text_app(settings) as running:
        assert running.instance.encoder is not None
        yield running.instance.text, running.instance.encoder.service


@asynccontextmanager
async def side_by_side(settings: TextSettings) -> AsyncGenerator[tuple[TextService, EncoderService[Any]]]:
    """Run both services over one thread, each with its own loop."""
    encoder_settings = EncoderSettings(
        model=settings.model, model_id=settings.model_id, transfers=TransferOptions(("shm",))
    )
    text_settings = settings.model_copy(update={"role": Role.PD})
    checkpoint = open_checkpoint(settings.model)
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(real_world("stages", "both", 1))
        compute = world.threads(1, name="engine")
        encoder_settings, encoder_engine = await stack.enter_async_context(
            encoder_engines.loaded(encoder_settings, world, checkpoint, compute=compute)
        )
        text_engine = await stack.enter_async_context(
            text_engines.loaded(text_settings, checkpoint, thread=compute, can_unload=False)
        )
        data_plane = ProcessDataPlane(settings.transfers, settings.host, None, beyond_loopback=False)
        encoder = await stack.enter_async_context(
            build_encoder(encoder_settings, replace(world, name="encoder"), data_plane, encoder_engine)
        )
        text = await stack.enter_async_context(build(text_settings, world, data_plane, text_engine))
        yield text.text, encoder.service


class Play:
    """One round of one system."""

    def __init__(self, text: TextService, encoder: EncoderService[Any], load: Load, seed: int) -> None:
        self._text = text
        self._encoder = encoder
        self._load = load
        self._rng = random.Random(seed)
        self._names = count()
        self._over = False
        self.seen = Seen()

    async def run(self, *, encodes: bool) -> Seen:
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as others:
            if encodes:
                for _ in range(self._load.callers):
                    others.create_task(self._encode())
            others.create_task(self._ask_now_and_then())
            async with asyncio.TaskGroup() as answers:
                for _ in range(self._load.answers):
                    answers.create_task(self._answer())
            self._over = True
            self.seen.took_s = time.perf_counter() - began_s
        return self.seen

    async def _answer(self) -> None:
        times = await self._generate(prompt_tokens=8, tokens=self._load.tokens)
        self.seen.gaps_s += [after - before for before, after in pairwise(times)]

    async def _ask_now_and_then(self) -> None:
        while not self._over:
            began_s = time.perf_counter()
            first_s, *_ = await self._generate(prompt_tokens=self._load.prompt_tokens, tokens=1)
            self.seen.first_s.append(first_s - began_s)
            await asyncio.sleep(self._load.prompt_every_s)

    async def _generate(self, *, prompt_tokens: int, tokens: int) -> list[float]:
        """Times of the tokens."""
        prompt = tuple(self._rng.randrange(8, VOCABULARY) for _ in range(prompt_tokens))
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        request = TextRequest(f"r{next(self._names)}", "random", prompt, (), sampling, 600.0)
        times: list[float] = []
        async with aclosing(self._text.generate(request)) as stream:
            async for events in stream:
                now_s = time.perf_counter()
                times += [now_s for event in events if isinstance(event, TokenChunk) for _ in event.token_ids]
        return times

    async def _encode(self) -> None:
        while not self._over:
            media = picture(self._rng)
            leases = self._rng.randbytes(16), self._rng.randbytes(16)
            info = inspect_media(media, MediaLimits())
            await self._encoder.encode(
                EncodeRequest("r", 0, "random", media, info, IMAGE_TOKENS, b"", 600.0, 60.0, leases[0], leases[1])
            )
            await self._encoder.release(leases)
            self.seen.images += not self._over


async def run(settings: TextSettings, load: Load, rounds: int) -> dict[str, list[Seen]]:
    results: dict[str, list[Seen]] = {system: [] for system in SYSTEMS}
    async with in_turns(settings) as turns, side_by_side(settings) as whenever:
        services = {"alone": turns, "whenever": whenever, "turns": turns}
        short = Load(load.answers, 8, load.callers, load.prompt_tokens, load.prompt_every_s)
        for system in SYSTEMS:
            await Play(*services[system], short, seed=0).run(encodes=system != "alone")
        for number in range(1, rounds + 1):
            for system in SYSTEMS:
                results[system].append(await Play(*services[system], load, seed=number).run(encodes=system != "alone"))
    return results


def report(results: dict[str, list[Seen]], tpot_slo_s: float) -> list[dict[str, Any]]:
    """All rounds of a system together, except the times of answers: medians over rounds."""
    rows: list[dict[str, Any]] = []
    for system, rounds in results.items():
        gaps_s = [gap for seen in rounds for gap in seen.gaps_s]
        rows.append(
            {
                "system": system,
                "tpot_mean_ms": round(1e3 * statistics.median(statistics.fmean(seen.gaps_s) for seen in rounds), 2),
                "gap_p50_ms": round(1e3 * statistics.median(gaps_s), 2),
                "gap_p99_ms": round(1e3 * percentile(gaps_s, 99), 2),
                "gap_max_ms": round(1e3 * max(gaps_s), 2),
                "gaps_within_objective": round(sum(gap <= tpot_slo_s for gap in gaps_s) / len(gaps_s), 4),
                "first_token_p50_ms": round(1e3 * statistics.median([t for seen in rounds for t in seen.first_s]), 2),
                "images_per_s": round(statistics.median(seen.images / seen.took_s for seen in rounds), 2),
            }
        )
    return rows


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=3, help="of tower and language model each")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--quick", action="store_true", help="only show that it works")
    options = parser.parse_args()
    load = Load(answers=8, tokens=48, callers=8, prompt_tokens=128, prompt_every_s=0.25)
    if options.quick:
        options.rounds, options.layers, options.hidden, load = 1, 1, 64, Load(2, 12, 2, 16, 0.01)
    on = machine.describe()
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), options.layers, options.hidden)
        settings = TextSettings(
            model=Path(name),
            model_id="random",
            role=Role.EPD,
            port=0,
            engine=EngineOptions(kv_cache_bytes=64 * MIB, max_sequences=16),
            image_cache_bytes=16 * MIB,
            transfers=TransferOptions(("shm",)),
        )
        tpot_slo_s, decode_s, two_images_s = objective_s(Path(name), settings)
        results = asyncio.run(
            run(
                settings.model_copy(update={"engine": replace(settings.engine, tpot_slo_s=tpot_slo_s)}),
                load,
                options.rounds,
            )
        )
    said = {
        "rounds": options.rounds,
        "layers": options.layers,
        "hidden": options.hidden,
        "load": asdict(load),
        "max_sequences": settings.engine.max_sequences,
        "encode_patience_s": settings.encode_patience_s,
        "tpot_slo_ms": round(1e3 * tpot_slo_s, 2),
        "full_decode_ms": round(1e3 * decode_s, 2),
        "two_images_ms": round(1e3 * two_images_s, 2),
    }
    rows = report(results, tpot_slo_s)
    print("; ".join(f"{key} {value}" for key, value in on.items()))
    print("; ".join(f"{key} {value}" for key, value in said.items()))
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    write_figures(options.json, {"machine": on, "settings": said, "rows": rows})


if __name__ == "__main__":
    main()
