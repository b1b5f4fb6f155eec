"""The router: places items and requests by its policies, and knows at once how each gets on."""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from random import Random

from triptych.domain.queue_position import QueuePosition
from triptych.domain.slo import Expected
from triptych.errors import InvalidMedia, Overloaded, TriptychError, Unavailable
from triptych.machine.router.expected_output import ExpectedOutput
from triptych.policy import admission
from triptych.policy.placement.items import Shortage, place_items
from triptych.policy.placement.pool import Pool
from triptych.policy.placement.requests import RequestPlace, RequestShortage, place_request
from triptych.policy.placement.wants import RequestWant, Want
from triptych.policy.policies import Policies
from triptych.services.router.settings import RouterSettings

from ..agenda import Agenda  # noqa: TID252 - of the simulator
from ..prepare import Prompts, Shape  # noqa: TID252
from .expectations import Expectations
from .instance import Instance
from .line import Line
from .request import Item, ItemSize, Request, Visit
from .transfers import Transfers

_NOBODY: Mapping[str, int] = {}


class QueueRouter:
    """Owner of the requests, and of what they wait for before they are at an instance."""

    def __init__(
        self,
        settings: RouterSettings,
        prompts: Prompts,
        instances: Mapping[str, Instance],
        pools: tuple[Pool, Pool],
        expectations: Expectations,
        transfers: Transfers,
        agenda: Agenda,
        rng: Random,
        on_end: Callable[[Request, str, float], None],
        *,
        kv_tokens: int,
        control_s: float,
    ) -> None:
        """``pools``: of encoders, and of those that prefill. ``kv_tokens``: most that an instance can hold for a request.
        ``on_end`` is told of each request that has ended: its error if there is one, and when the router has the last of it.
        """
        self._settings = settings
        self._policies = Policies.named(settings.policies)
        self._prompts = prompts
        self._instances = instances
        self._encoders, self._texts = pools
        self._expectations = expectations
        self._transfers = transfers
        self._agenda = agenda
        self._rng = rng
        self._on_end = on_end
        self._kv_tokens = kv_tokens
        self._control_s = control_s
        self._answers = ExpectedOutput()
        self._sizes: dict[int, tuple[ItemSize, ...]] = {}
        """Of the items of each shape, by its id: ``prompts`` keeps shapes."""
        self._holds = any(instance.encoder is not None and instance.text is not None for instance in instances.values())
        """Whether a text instance can have embeddings in its own memory."""
        self._running = self._media_bytes = self._promised_kv_tokens = 0
        self._for_encoders: Line[Request] = Line()
        self._for_texts: Line[Request] = Line()
        """Requests that wait for room in arenas, and for KV memory."""
        self._deadlines: deque[tuple[float, Request, bool]] = deque()
        """Of requests, and whether their callers wait no longer either; the first first, as all have the same time limit."""
        for instance in instances.values():
            if instance.encoder is not None:
                instance.encoder.encoded = self.encoded
            if instance.text is not None:
                instance.text.router = self

    # --- arrivals ----------------------------------------------------------------------------------------------------

    def admit(self, request: Request, timeout_s: float) -> None:
        """A request has come. Raises TriptychError if it is refused."""
        now_s, settings, planned, number = self._agenda.now_s, self._settings, request.planned, request.number
        shape = self._prompts.shape(number, planned)
        if (sizes := self._sizes.get(id(shape))) is None:
            sizes = self._sizes[id(shape)] = tuple([ItemSize.of(item) for item in shape.items])
        media_bytes = sum([size.media_nbytes for size in sizes])
        admission.check_items(len(shape.items), settings.request_size, "messages")
        self._policies.admission(
            requests=self._running,
            media_bytes=self._media_bytes,
            new_media_bytes=media_bytes,
            bounds=settings.capacity,
        )
        left_s = admission.check_timeout(timeout_s, settings.max_timeout_s)
        self._prompts.check_length(number, planned, kv_tokens=self._kv_tokens, kv_block_tokens=1)
        request.deadline_s, request.prepared_s = now_s + left_s, now_s
        request.media_bytes = media_bytes
        self._running += 1
        self._media_bytes += media_bytes
        request.prompt_tokens = prompt_tokens = shape.tokens + planned.text_tokens
        answer_tokens = self._answers.predict(bool(shape.items), planned.output_tokens)
        request.answer_tokens, kv_tokens = answer_tokens, prompt_tokens + answer_tokens
        request.kv_tokens = min(kv_tokens, self._kv_tokens) if self._kv_tokens else kv_tokens
        if not self._deadlines:
            self._agenda.at(request.deadline_s, self._pass_deadlines)
        self._deadlines.append((request.deadline_s, request, left_s == timeout_s))
        expected = self._expectations.of(shape, prompt_tokens)
        request.ttft_limit_s = expected.ttft_limit_s
        request.needs_prefill_s = 0.0 if expected.isolated is None else expected.isolated.prefill_s
        if not shape.items:
            request.encoded_s = now_s
            self._want_text(request)
            return
        request.sizes = self._in_shards(shape, sizes) if shape.divides else sizes
        self._want_encoders(request, expected)

    def _in_shards(self, shape: Shape, sizes: tuple[ItemSize, ...]) -> tuple[ItemSize, ...]:
        """Of its items, or of their shards where some are split."""
        parts = self._policies.sharding(shape.items, self._encoders, self._settings.shards)
        return sizes if len(parts) == len(sizes) else tuple([ItemSize.of(part) for part in parts])

    def _position(self, request: Request, needs_s: float) -> QueuePosition:
        """Its position in the queues of a stage, from which it needs so long to its first token."""
        limit_s, arrived_s = request.ttft_limit_s, request.prepared_s
        return self._policies.ordering(
            priority=0,
            deadline_s=request.deadline_s,
            arrived_s=arrived_s,
            arrival=request.number,
            due_s=inf if limit_s is None else arrived_s + limit_s,
            needs_s=needs_s,
        )

    # --- encoders ----------------------------------------------------------------------------------------------------

    def _want_encoders(self, request: Request, expected: Expected) -> None:
        alone = expected.isolated
        needs_s = 0.0 if alone is None else alone.prefill_s + alone.encode_s
        request.position = request.encode_position = self._position(request, needs_s)
        if not self._for_encoders and self._placed(request):
            return
        if len(self._for_encoders) >= self._settings.cluster.max_waiting_requests:
            self._end(request, Overloaded("too many requests wait for an encoder"))
            return
        self._for_encoders.add(request, self._agenda.now_s)

    def _placed(self, request: Request) -> bool:
        """Whether all its items have encoders now, or it has failed for want of them."""
        pool, number = self._encoders, request.number.to_bytes(8, "big")
        sizes = request.sizes
        wants = [
            Want(
                place,
                size.tokens,
                size.nbytes,
                (number + place.to_bytes(4, "big"), b""),
                media_nbytes=size.media_nbytes,
                pixels=size.pixels,
            )
            for place, size in enumerate(sizes)
        ]
        choices = place_items(pool, wants, self._policies.encoder_routing, self._rng)
        if isinstance(choices, Shortage):
            if choices is Shortage.NO_CREDIT:
                return False
            self._end(request, InvalidMedia(choices.value))
            return True
        pool.turn += 1
        request.items_left, at_s = len(choices), self._agenda.now_s + self._control_s
        for choice in choices:
            encoder = self._instances[choice.encoder]
            item = Item(request, sizes[choice.item], encoder)
            request.items.append(item)
            encoder.give_item(choice.tokens, 1, choice.nbytes)
            assert encoder.encoder is not None  # noqa: S101 - it is in the pool of encoders
            encoder.encoder.take(item, at_s)
        return True

    def encoded(self, item: Item) -> None:
        """An item is encoded, and its encoder answers."""
        request = item.request
        item.is_encoded = True
        item.encoder.give_item(-item.size.tokens, -1, 0)
        request.items_left -= 1
        if not request.items_left:
            request.encoded_s = self._agenda.now_s + self._control_s
            self._want_text(request)
        if self._for_encoders:
            self._serve_encoders()

    def _release(self, request: Request) -> None:
        """Its items, encoded or not, take nothing any more."""
        for item in request.items:
            if item.is_encoded:
                item.encoder.give_item(0, 0, -item.size.nbytes)
            else:
                item.encoder.give_item(-item.size.tokens, -1, -item.size.nbytes)
                assert item.encoder.encoder is not None  # noqa: S101 - as it has the item
                item.encoder.encoder.leave(item)
        request.items.clear()
        if self._for_encoders:
            self._serve_encoders()

    def _serve_encoders(self) -> None:
        """In their order; who waits for room holds up those behind."""
        now_s = self._agenda.now_s
        while (request := self._for_encoders.first(now_s)) is not None and self._placed(request):
            self._for_encoders.remove(request)

    # --- text instances ----------------------------------------------------------------------------------------------

    def _want_text(self, request: Request) -> None:
        """All items are encoded, or its keys and values are computed."""
        request.position = self._position(request, request.needs_prefill_s)
        if request.prefiller is not None:
            request.position = request.position._replace(lost_s=inf)
        if self._placed_text(request, first_in_line=not self._for_texts):
            return
        if len(self._for_texts) >= self._settings.cluster.max_waiting_requests:
            self._end(request, Overloaded("too many requests wait for KV memory"))
            return
        self._for_texts.add(request, self._agenda.now_s)

    def _serve_texts(self) -> None:
        now_s = self._agenda.now_s
        while (request := self._for_texts.first(now_s)) is not None and self._placed_text(request, first_in_line=True):
            self._for_texts.remove(request)

    def _placed_text(self, request: Request, *, first_in_line: bool) -> bool:
        """Whether it has a text instance now, or has failed for want of one."""
        policies, prefiller = self._policies, request.prefiller
        continues = prefiller is not None
        want = RequestWant(
            request.prompt_tokens - (0 if prefiller is None else prefiller.offered),
            request.answer_tokens,
            kv_tokens=request.kv_tokens,
            holders=self._holders(request) if self._holds and request.items else _NOBODY,
            continues=continues,
            first_in_line=first_in_line,
            promised_kv_tokens=self._promised_kv_tokens,
            sender="" if prefiller is None else prefiller.text.name,
            sender_kv_kind=""
            if prefiller is None or prefiller.text.text is None
            else prefiller.text.text.kv_kind.digest,
        )
        place = place_request(self._texts, want, policies.text_routing, policies.kv_transfer, self._rng)
        if not isinstance(place, RequestPlace):
            if place is RequestShortage.TO_COME:
                return False
            self._end(request, Unavailable("no text instance is available"))
            return True
        (self._texts.answers if continues else self._texts).turn += 1
        instance = self._instances[place.name]
        visit = request.visit = Visit(request, instance, request.position, transfers_kv=place.transfers_kv)
        if place.transfers_kv:
            self._promised_kv_tokens += request.kv_tokens
            instance.give_request(request.prompt_tokens, 0, 1, 0)
        else:
            prompt_tokens = 0 if continues else request.prompt_tokens
            instance.give_request(prompt_tokens, request.answer_tokens, 1, request.kv_tokens)
        self._send(request, visit)
        return True

    def _holders(self, request: Request) -> dict[str, int]:
        """Bytes of its embeddings, by encoder."""
        holders: Counter[str] = Counter()
        for item in request.items:
            holders[item.encoder.id] += item.size.nbytes
        return holders

    def _send(self, request: Request, visit: Visit) -> None:
        """The call, and the pull of embeddings from other instances."""
        text = visit.text
        assert text.text is not None  # noqa: S101 - it is in a pool of text instances
        text.text.visits += 1
        at_s = visit.arrived_s = max(self._agenda.now_s, request.encoded_s) + self._control_s
        elsewhere: dict[str, int] = {}
        if request.prefiller is None and request.items:
            elsewhere = self._holders(request)
            elsewhere.pop(text.id, None)
        if not elsewhere:
            self._agenda.at(at_s, text.text.enter, visit)
            return
        at_s += self._transfers.delay_s(text.id, elsewhere)
        self._agenda.at(at_s, self._pull, visit, elsewhere)

    def _pull(self, visit: Visit, elsewhere: Mapping[str, int]) -> None:
        if not visit.is_over:
            self._transfers.pull(visit.text.id, elsewhere, partial(self._pulled, visit, elsewhere))

    def _pulled(self, visit: Visit, elsewhere: Mapping[str, int]) -> None:
        now_s = self._agenda.now_s
        visit.request.pull_s = now_s - visit.arrived_s
        visit.text.activity.pulled(visit.arrived_s, now_s, sum(elsewhere.values()))
        assert visit.text.text is not None  # noqa: S101 - as above
        visit.text.text.enter(visit)

    # --- as ``RequestListener`` --------------------------------------------------------------------------------------

    def first_token(self, visit: Visit, at_s: float, *, in_first_step: bool) -> None:
        """A message says first that it has begun, then another one brings the token."""
        request = visit.request
        visit.came_s = at_s + (2 if in_first_step else 1) * self._control_s
        joined_s = at_s if visit.joined_s is None else visit.joined_s
        request.queue_s = max(0.0, joined_s - visit.arrived_s - request.pull_s)
        request.prefill_s, request.first_s = at_s - joined_s, visit.came_s
        visit.text.give_request(-request.prompt_tokens, 0, 0, 0)
        self._release(request)
        if self._for_texts:
            self._serve_texts()

    def ended(self, visit: Visit, at_s: float) -> None:
        request = visit.request
        decode, kv_tokens = self._given(visit)
        request.visit = None
        visit.text.give_request(0, -decode, -1, -kv_tokens)
        came_s = max(at_s + self._control_s, visit.came_s)
        if self._for_texts:
            self._serve_texts()
        self._answers.observe(bool(request.sizes), request.planned.output_tokens, by_itself=False)
        self._end(request, None, came_s)

    def _given(self, visit: Visit) -> tuple[int, int]:
        """What the instance was given of it beside its prompt: tokens to decode, and KV memory."""
        request = visit.request
        if not visit.transfers_kv:
            return request.answer_tokens, request.kv_tokens
        self._promised_kv_tokens -= request.kv_tokens
        return 0, 0

    def exported(self, visit: Visit, at_s: float) -> None:
        """The router learns of it once it has the first token."""
        visit.request.prefiller, visit.request.visit = visit, None
        self._agenda.at(max(at_s, visit.came_s) + self._control_s, self._goes_on, visit)

    def _goes_on(self, visit: Visit) -> None:
        self._given(visit)
        visit.text.give_request(0, 0, -1, 0)
        if not visit.request.is_over:
            self._want_text(visit.request)
        if self._for_texts:
            self._serve_texts()

    def imported(self, visit: Visit) -> None:
        request = visit.request
        if request.prefiller is not None:
            self._free(request.prefiller)

    def _free(self, prefiller: Visit) -> None:
        """Nobody needs what it holds."""
        if prefiller.holds_nbytes and prefiller.text.text is not None:
            prefiller.text.text.free_room(prefiller)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _end(self, request: Request, error: TriptychError | None, at_s: float | None = None) -> None:
        reason = "" if error is None else f"HTTP {error.http_status}"
        self._forget(request)
        self._on_end(request, reason, self._agenda.now_s if at_s is None else at_s)

    def _forget(self, request: Request) -> None:
        request.is_over = True
        self._running -= 1
        self._media_bytes -= request.media_bytes
        if request.items:
            self._release(request)
        deadlines = self._deadlines
        while len(deadlines) > 1 and deadlines[0][1].is_over:
            deadlines.popleft()

    def _pass_deadlines(self) -> None:
        deadlines, now_s = self._deadlines, self._agenda.now_s
        while deadlines and (deadlines[0][0] <= now_s or deadlines[0][1].is_over):
            _, request, is_callers = deadlines.popleft()
            if not request.is_over:
                self._give_up(request)
                self._on_end(request, "timeout" if is_callers else "HTTP 504", now_s)
        if deadlines:
            self._agenda.at(deadlines[0][0], self._pass_deadlines)

    def _give_up(self, request: Request) -> None:
        """Its time is up: it leaves wherever it is."""
        self._for_encoders.remove(request)
        self._for_texts.remove(request)
        visit, prefiller = request.visit, request.prefiller
        if visit is not None:
            decode, kv_tokens = self._given(visit)
            visit.text.give_request(0 if request.first_s else -request.prompt_tokens, -decode, -1, -kv_tokens)
            assert visit.text.text is not None  # noqa: S101 - it is at a text instance
            visit.text.text.leave(visit)
        if prefiller is not None:
            self._free(prefiller)
        self._forget(request)
        if self._for_texts:
            self._serve_texts()
