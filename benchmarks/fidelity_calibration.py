"""What services take beside engines, of one model on this machine, for ``triptych simulate --host``.

A cluster of an encoder and a text instance gets requests of three kinds (text and a token, text and a longer answer, an image and a token), one at a
time, then eight together. One that prefills and decodes apart gets texts and a token, or two: those are transferred. The CPU time of each process, but
for what idle ones take and what the profile has for the engine, is divided among requests, items, messages, steps, sequences and transfers of keys and
values. How much slower passes are beside decodes is seen from an item at an encoder and from a prompt at an instance that only prefills, each alone and
while another instance decodes; how much slower decodes are beside passes, from steps of one that only decodes; how much slower decodes are beside
others, from two answers at two instances.
"""

import asyncio
import statistics
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace

from benchmarks.fidelity_live import CLIENT, DECODE, ENCODER, GATEWAY, PREFILL, ROUTER, TEXT, Live, Watched, answered
from triptych.domain.profile import Profile
from triptych.domain.stage import ModelPart
from triptych.policy.costs import Costs
from triptych.sim.host import Cost, EncoderCosts, FrontCosts, Host, TextCosts
from triptych.workload.report import Record
from triptych.workload.requests import Planned, Size

IDLE_S = 3.0
TOGETHER = 8
ANSWER = 33
CONTROL_S = 0.0001
"""Taken to be the time of a message between two processes beside their CPU time."""
HOPS = 6
"""Such messages before a lone request's first token: from the client to the text instance and back."""
TRANSFER_HOPS = 4
"""Such messages between the first token and the second where another instance decodes: to the router, to that instance, to the first and back."""
TURNS = 4
"""How often work alone and beside other work is measured in turn, as the machine's speed changes."""
PROMPTS = 31
"""Lone ones by which the machine's speed is seen, after a first, ..."""
ANSWERS = 7
"""... and lone answers: of two tokens, and longer ones."""
LONG_ANSWER = 400
"""Tokens of answers beside which other work is measured."""
PROMPT_S = 0.3
"""Longer than the first of these answers takes to begin."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What the requests of one kind took, each; seconds. CPU time without that of idle processes."""

    kind: str
    requests: int
    prompt_tokens: float
    tokens: int
    cpu_s: Mapping[str, float]
    """By kind of process."""
    ttft_s: float
    tpot_s: float
    """Medians."""
    stages_s: Mapping[str, float]
    """Means."""
    foreign_cores: float
    passes: Mapping[str, float]
    """Steps of the text engine and batches of the encoder, by kind of process."""

    @property
    def answer_s(self) -> float:
        """From a request to the last token of its answer."""
        return self.ttft_s + (self.tokens - 1) * self.tpot_s


@dataclass(frozen=True, slots=True)
class Slowed:
    """CPU time of a piece of work, seconds: of a prompt or item alone and beside decodes, or of decodes alone and beside prompts or other decodes."""

    alone_s: float
    beside_s: float

    @property
    def speed(self) -> float:
        """Speed of this work beside other work, as a share of its speed alone."""
        return self.alone_s / self.beside_s if self.beside_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Item:
    """An image of the calibration."""

    tokens: int
    """Of its embedding."""
    nbytes: int
    """Undecoded."""
    pixels: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """Of one model."""

    idle_cores: Mapping[str, float]
    """What processes take while nothing is asked, by their kind."""
    taken: Mapping[str, Taken]
    """By kind of requests."""
    slowed: Mapping[str, Slowed] = field(default_factory=dict)
    """By kind of process: ``ENCODER`` items and ``PREFILL`` prompts beside decodes, ``DECODE`` decodes beside both, ``TEXT`` decodes beside decodes."""

    @property
    def pass_speed(self) -> float:
        """As in ``Host``: the mean of prompts and items beside decodes and their messages; 1 if neither was measured."""
        speeds = [self.slowed[process].speed for process in (ENCODER, PREFILL) if process in self.slowed]
        return min(1.0, statistics.fmean(speeds)) if speeds else 1.0

    def decode_speed(self, process: str) -> float:
        """Speed of decodes of a kind of process beside what ``slowed`` says; 1 if it was not measured."""
        return min(1.0, self.slowed[process].speed) if process in self.slowed else 1.0

    @property
    def lone_step_s(self) -> float:
        """CPU time of a text instance for a step of a lone answer."""
        answer, text = self.taken["answer"], self.taken["text"]
        return (answer.cpu_s[TEXT] - text.cpu_s[TEXT]) / (answer.passes[TEXT] - text.passes[TEXT])

    def host(self, profiles: Mapping[ModelPart, Profile], image: Item, cores: int) -> Host:
        """For the simulator. ``image``: the items of the kinds that have one."""
        decoder, encoder = Costs(profiles[ModelPart.DECODER]), Costs(profiles[ModelPart.ENCODER])
        alone, together = (_Kinds(self.taken, decoder, encoder, image, number) for number in (1, TOGETHER))
        more = together.sequences - alone.sequences
        sequence_s = max(0.0, (together.step_s - alone.step_s) / more) if more > 0 else 0.0
        step_s = max(0.0, alone.step_s - alone.sequences * sequence_s)
        before, item_before = alone.before(step_s + sequence_s), alone.item_before(step_s)
        encoder_before = alone.encoder_before

        def cost(of: Callable[[_Kinds], float]) -> Cost:
            """Of eight that come together the first comes alone."""
            first_s, mean_s = of(alone), of(together)
            return Cost(max(0.0, first_s), max(0.0, (TOGETHER * mean_s - first_s) / (TOGETHER - 1)))

        def front(process: str) -> FrontCosts:
            return FrontCosts(
                request=cost(lambda kinds: before * kinds.request_s(process)),
                item=cost(lambda kinds: item_before * kinds.item_s(process)),
                message=cost(lambda kinds: kinds.message_s(process)),
                end=cost(lambda kinds: (1 - before) * kinds.request_s(process)),
                item_end=cost(lambda kinds: (1 - item_before) * kinds.item_s(process)),
            )

        transferred = alone.transferred(step_s, sequence_s, before)
        text = TextCosts(
            request=cost(lambda kinds: before * kinds.text_request_s(step_s, sequence_s)),
            item=cost(lambda kinds: item_before * kinds.text_item_s(step_s)),
            end=cost(lambda kinds: (1 - before) * kinds.text_request_s(step_s, sequence_s)),
            export=cost(lambda kinds: transferred * kinds.export_s),
            transfer=cost(lambda kinds: transferred * kinds.import_s(step_s, sequence_s)),
            transfer_end=cost(lambda kinds: kinds.transfer_end_s(step_s, sequence_s, transferred)),
            step_s=step_s,
            sequence_s=sequence_s,
        )
        return Host(
            cores=cores - sum(self.idle_cores.values()),
            pass_speed=self.pass_speed,
            decode_speed=self.decode_speed(DECODE),
            decodes_speed=self.decode_speed(TEXT),
            client=front(CLIENT),
            gateway=front(GATEWAY),
            router=front(ROUTER),
            text=text,
            encoder=EncoderCosts(
                item=cost(lambda kinds: encoder_before * kinds.encoder_item_s),
                end=cost(lambda kinds: (1 - encoder_before) * kinds.encoder_item_s),
            ),
        )


@dataclass(frozen=True, slots=True)
class _Kinds:
    """The kinds of requests that came alone, or so many ``together``: what each part of a request took on average."""

    taken: Mapping[str, Taken]
    decoder: Costs
    encoder: Costs
    image: Item
    together: int

    def _of(self, kind: str) -> Taken:
        return self.taken[kind if self.together == 1 else f"{kind}s"]

    def message_s(self, process: str) -> float:
        return (self._of("answer").cpu_s[process] - self._of("text").cpu_s[process]) / (ANSWER - 1)

    def request_s(self, process: str) -> float:
        return self._of("text").cpu_s[process] - self.message_s(process)

    def item_s(self, process: str) -> float:
        return self._of("image").cpu_s[process] - self._of("text").cpu_s[process]

    def _steps(self, kind: str) -> float:
        """Steps of the text instance for each request."""
        return self._of(kind).passes[TEXT]

    def _decodes(self, kind: str) -> tuple[float, float]:
        """Steps that decode for each request of the longer answers, and the engine's time of one."""
        answer = self._of(kind)
        steps = self._steps(kind) - self._steps("text")
        return steps, self.decoder.decode_s((ANSWER - 1) / steps, answer.prompt_tokens + ANSWER / 2).value

    @property
    def sequences(self) -> float:
        """Sequences in a step that decodes, on average."""
        return (ANSWER - 1) / self._decodes("answer")[0]

    @property
    def step_s(self) -> float:
        """CPU time of the text instance for a step that decodes, beside its engine's."""
        return self.sequences * self.message_s(TEXT) - self._decodes("answer")[1]

    def _transfer(self, process: str) -> float:
        """CPU time of a process for a request that goes on at another instance after its first token, beside what it takes without a second."""
        if "transfer" not in self.taken:
            return 0.0
        return self._of("transfer").cpu_s[process] - self._of("first").cpu_s[process]

    @property
    def export_s(self) -> float:
        """CPU time of the instance that prefills, seconds; 0 if transfers were not measured."""
        return max(0.0, self._transfer(PREFILL))

    def import_s(self, step_s: float, sequence_s: float) -> float:
        """CPU time of the instance that decodes, seconds, beside what it takes of any request and for the second token; 0 if transfers were not measured."""
        if "transfer" not in self.taken:
            return 0.0
        request_s = self.text_request_s(step_s, sequence_s)
        return max(0.0, self._transfer(DECODE) - request_s - self._second_token_s(step_s, sequence_s))

    def transfer_end_s(self, step_s: float, sequence_s: float, transferred: float) -> float:
        """What nothing waits for; of the router too."""
        if "transfer" not in self.taken:
            return 0.0
        instances_s = self.export_s + self.import_s(step_s, sequence_s)
        return (1 - transferred) * instances_s + max(0.0, self._transfer(ROUTER) - self.message_s(ROUTER))

    def transferred(self, step_s: float, sequence_s: float, before: float) -> float:
        """As ``before``, of what a transfer takes: it lengthens the gap between the first token and the second."""
        if "transfer" not in self.taken:
            return 0.0
        request_s = before * self.text_request_s(step_s, sequence_s)
        known_s = request_s + self._second_token_s(step_s, sequence_s) + TRANSFER_HOPS * CONTROL_S
        return _share(self._of("transfer").tpot_s - known_s, self.export_s + self.import_s(step_s, sequence_s))

    def _second_token_s(self, step_s: float, sequence_s: float) -> float:
        """CPU time of the step in which an instance goes on with a request. Another step, of no tokens, lets requests begin."""
        transfer = self._of("transfer")
        steps = transfer.passes[DECODE] / 2
        return steps * (self.decoder.decode_s(1 / steps, transfer.prompt_tokens).value + step_s) + sequence_s

    def _prefill_s(self, kind: str) -> float:
        """Engine time of a prompt, in steps with as many prompts as there were on average."""
        steps = self._steps(kind)
        return steps * self.decoder.prefill_s(self._of(kind).prompt_tokens / steps).value

    def text_request_s(self, step_s: float, sequence_s: float) -> float:
        return self._of("text").cpu_s[TEXT] - self._prefill_s("text") - self._steps("text") * step_s - sequence_s

    def text_item_s(self, step_s: float) -> float:
        more = self._prefill_s("image") - self._prefill_s("text")
        return self.item_s(TEXT) - more - (self._steps("image") - self._steps("text")) * step_s

    @property
    def _engine_s(self) -> float:
        """Of an item, what the encoder's profile has."""
        prepare_s = self.encoder.prepare_s(self.image.nbytes, self.image.pixels).value
        batches = self._of("image").passes[ENCODER]
        return prepare_s + batches * self.encoder.encode_s(self.image.tokens, 1 / batches).value

    @property
    def encoder_item_s(self) -> float:
        return self._of("image").cpu_s[ENCODER] - self._engine_s

    @property
    def encoder_before(self) -> float:
        """As ``before``, of what an item takes at the encoder: what of its stage is not known otherwise."""
        return _share(self._of("image").stages_s["encode"] - 2 * CONTROL_S - self._engine_s, self.encoder_item_s)

    def item_before(self, step_s: float) -> float:
        """As ``before``, of what an item takes: the time that the encoder and the pull add are known."""
        image, text = self._of("image"), self._of("text")
        known_s = image.stages_s["encode"] + image.stages_s["pull"] + self._prefill_s("image") - self._prefill_s("text")
        all_s = sum(self.item_s(process) for process in (CLIENT, GATEWAY, ROUTER)) + self.text_item_s(step_s)
        return _share(image.ttft_s - text.ttft_s - known_s, all_s)

    def before(self, lone_step_s: float) -> float:
        """Of what lone requests take outside engines, the share that comes before the first token: what of the time to it is not known
        otherwise.
        """
        text = self._of("text")
        messages_s = sum(self.message_s(process) for process in (CLIENT, GATEWAY, ROUTER))
        known_s = messages_s + self._prefill_s("text") + lone_step_s + HOPS * CONTROL_S
        all_s = sum(self.request_s(process) for process in (CLIENT, GATEWAY, ROUTER))
        all_s += self.text_request_s(lone_step_s, 0.0)
        return _share(text.ttft_s - known_s, all_s)


def toml(host: Host) -> str:
    """As ``triptych simulate --host`` reads it."""
    lines: list[str] = []
    for name, value in asdict(host).items():
        if isinstance(value, dict):
            lines += ["", f"[{name}]"]
            lines += [
                f"{key} = {[round(seconds, 7) for seconds in cost.values()] if isinstance(cost, dict) else round(cost, 7)}"
                for key, cost in value.items()
            ]
        else:
            lines.append(f"{name} = {value:.4f}")
    return "\n".join(lines)


def _share(part_s: float, whole_s: float) -> float:
    """From 0 to 1, as both are measured; all of a whole that is nothing."""
    return min(1.0, max(0.0, part_s / whole_s)) if whole_s > 0 else 1.0


async def measure(live: Live, image: Size, words: int, *, requests: int) -> Calibration:
    """``words``: of each prompt; ``requests``: of each kind."""
    idle_cores = await idle_cores_of(live)
    kinds = {"text": (0, 1), "answer": (0, ANSWER), "image": (1, 1)}
    taken = await _take(live, kinds, image, words, requests, idle_cores)
    item = Planned(0.0, words, (image,), 1)
    slowed = await _slowed(live, ENCODER, [item] * requests, idle_cores)
    return Calibration(idle_cores, taken, slowed)


async def with_transfers(measured: Calibration, apart: Live, image: Size, words: int, *, requests: int) -> Calibration:
    """The calibration with what it takes to transfer keys and values. ``apart``: a cluster that prefills and decodes apart."""
    idle_cores = await idle_cores_of(apart)
    taken = await _take(apart, {"first": (0, 1), "transfer": (0, 2)}, image, words, requests, idle_cores)
    prompt = Planned(0.0, words, (), 1)
    answer_s = taken["transfer"].cpu_s[PREFILL]
    slowed = await _slowed(apart, PREFILL, [prompt] * requests, idle_cores, answer_s=answer_s)
    return replace(measured, taken={**measured.taken, **taken}, slowed={**measured.slowed, **slowed})


async def with_two(measured: Calibration, monoliths: Live, words: int) -> Calibration:
    """The calibration with how much slower decodes are beside others. ``monoliths``: a cluster of two, of which each gets one of two answers."""
    idle_cores = await idle_cores_of(monoliths)
    spent_s, steps = [0.0, 0.0], [0.0, 0.0]
    for turn in range(TURNS):
        for beside in (0, 1):
            wanted = [Planned(0.0, words, (), LONG_ANSWER)] * (1 + beside)
            began = await monoliths.watched()
            answered(await monoliths.send(wanted, f"two {turn} {beside}"))
            took = (await monoliths.watched()).since(began)
            prompts_s = len(wanted) * measured.taken["text"].cpu_s[TEXT]
            spent_s[beside] += took.cpu_s[TEXT] - idle_cores[TEXT] * took.at_s - prompts_s
            steps[beside] += took.passes[TEXT] - len(wanted)
    alone_s, beside_s = (spent / number for spent, number in zip(spent_s, steps, strict=True))
    return replace(measured, slowed={**measured.slowed, TEXT: Slowed(alone_s, beside_s)})


async def _slowed(
    live: Live, process: str, requests: Sequence[Planned], idle_cores: Mapping[str, float], *, answer_s: float = 0.0
) -> dict[str, Slowed]:
    """What each of these requests takes of a process, alone and while another one decodes; of an instance that only decodes also its steps, alone
    and beside these requests. ``answer_s``: what the answers that are decoded take of the process.
    """
    spent_s: dict[tuple[str, bool], float] = defaultdict(float)
    """By kind of process, and whether another one works too."""
    pieces: dict[tuple[str, bool], float] = defaultdict(float)
    for turn in range(TURNS):
        wanted, lasted_s = requests[turn::TURNS], 0.0
        for works, decodes in ((True, False), (True, True), (False, True)):
            seed = f"slowed {process} {turn} {works} {decodes}"
            async with _answering(live, requests[0].text_tokens, f"{seed} answers", wanted=decodes) as begun:
                before, began = len(begun), await live.watched()
                if works:
                    await live.send_in_groups(wanted, seed)
                else:
                    await asyncio.sleep(lasted_s)
                took = (await live.watched()).since(began)
                answers = len(begun) - before
            lasted_s = took.at_s
            if works:
                own_s = took.cpu_s[process] - idle_cores[process] * took.at_s
                spent_s[process, decodes] += own_s - answer_s * answers
                pieces[process, decodes] += len(wanted) + 1
            if decodes:
                spent_s[DECODE, works] += took.cpu_s[DECODE] - idle_cores[DECODE] * took.at_s
                pieces[DECODE, works] += took.passes[DECODE]
    return {
        kind: Slowed(*(spent_s[kind, beside] / pieces[kind, beside] for beside in (False, True)))
        for kind in (process, DECODE)
        if pieces[kind, True]
    }


@asynccontextmanager
async def _answering(live: Live, words: int, seed: str, *, wanted: bool) -> AsyncGenerator[list[str]]:
    """Decode long answers meanwhile, one after the other, if that is wanted. Gives those that have begun."""
    begun: list[str] = []
    is_over = asyncio.Event()

    async def answer() -> None:
        while not is_over.is_set():
            begun.append(f"{seed} {len(begun)}")
            answered(await live.send([Planned(0.0, words, (), LONG_ANSWER)], begun[-1]))

    async with asyncio.TaskGroup() as group:
        if wanted:
            group.create_task(answer())
            await asyncio.sleep(PROMPT_S)
        try:
            yield begun
        finally:
            is_over.set()


async def paces(
    measured: Calibration, live: Live, words: int, idle_cores: Mapping[str, float], seed: str
) -> tuple[float, float]:
    """CPU time of a lone prompt, and of a step of a lone answer, over those in the calibration. Predictions do not know how the machine's speed
    changes, which differs for what computes and what reads memory. ``seed``: of the prompts, of which none may be cached.
    """

    async def spent_s(number: int, tokens: int) -> float:
        """CPU time of each of these requests."""
        before = await live.watched()
        records = await live.send_in_groups([Planned(0.0, words, (), tokens)] * number, f"pace {tokens} {seed}")
        took = (await live.watched()).since(before)
        all_s = sum(took.cpu_s[kind] - idle_cores[kind] * took.at_s for kind in (TEXT, PREFILL, DECODE))
        return all_s / (len(records) + 1)

    prompt_s, transferred_s, answer_s = [
        await spent_s(number, tokens) for number, tokens in ((PROMPTS, 1), (ANSWERS, 2), (ANSWERS, ANSWER))
    ]
    step_s = (answer_s - transferred_s) / (ANSWER - 2)
    return prompt_s / measured.taken["text"].cpu_s[TEXT], step_s / measured.lone_step_s


async def idle_cores_of(live: Live) -> Mapping[str, float]:
    before = await live.watched()
    await asyncio.sleep(IDLE_S)
    idle = (await live.watched()).since(before)
    return {kind: spent_s / idle.at_s for kind, spent_s in idle.cpu_s.items()}


async def _take(
    live: Live,
    kinds: Mapping[str, tuple[int, int]],
    image: Size,
    words: int,
    requests: int,
    idle_cores: Mapping[str, float],
) -> dict[str, Taken]:
    """Of each kind, which has so many images and tokens of its answer: alone, and together."""
    taken: dict[str, Taken] = {}
    for together in (1, TOGETHER):
        for name, (images, tokens) in kinds.items():
            kind = name if together == 1 else f"{name}s"
            wanted = [Planned(0.0, words, (image,) * images, tokens)] * requests
            await live.send_in_groups(wanted[:8], f"warm {kind}", together=together)
            began = await live.watched()
            records = await live.send_in_groups(wanted, f"calibration {kind}", together=together)
            taken[kind] = _taken(kind, records, (await live.watched()).since(began), idle_cores)
    return taken


def _taken(kind: str, records: Sequence[Record], watched: Watched, idle_cores: Mapping[str, float]) -> Taken:
    number = len(records)
    own = {name: (spent_s - idle_cores[name] * watched.at_s) / number for name, spent_s in watched.cpu_s.items()}
    return Taken(
        kind,
        number,
        statistics.mean(record.prompt_tokens for record in records),
        records[0].tokens,
        own,
        statistics.median(record.ttft_s or 0.0 for record in records),
        statistics.median(record.tpot_s or 0.0 for record in records),
        {stage: sum_s / max(1.0, watched.requests) for stage, sum_s in watched.stages_s.items()},
        watched.foreign_cores,
        {kind: passes / number for kind, passes in watched.passes.items()},
    )
