"""One instance: its queues, and what the router has given it."""

from triptych.domain.instance import InstanceLoad, StageLoad
from triptych.domain.stage import Role, Stage
from triptych.policy.kv_transfer import KvRoom
from triptych.policy.placement.pool import Candidate, Pool, TextLoad, TextTraits
from triptych.services.text.open_stages import stage_loads

from ..engines import Activity  # noqa: TID252 - of the simulator
from ..outcome import Busy, InstanceUse  # noqa: TID252
from ..scenario import InstanceKind  # noqa: TID252
from .encoder import QueueEncoder
from .text import QueueText


class Instance:
    """Owner of its rows in the pools by which the router places items and requests."""

    is_up = True

    def __init__(self, id_: str, role: Role, kind: InstanceKind, activity: Activity) -> None:
        self.id = self.name = id_
        self.role = role
        self.kind = kind
        self.activity = activity
        self.encoder: QueueEncoder | None = None
        self.text: QueueText | None = None
        """Both are set before anything else."""
        self.kv_tokens = 0
        """Of its KV memory."""
        self._encodes: list[tuple[Pool, int]] = []
        self._texts: list[tuple[Pool, int]] = []
        """The pools that it is in, and its place there."""
        self._prefill_tokens = self._decode_tokens = self._requests = self._own_kv_tokens = 0

    # --- for the router ----------------------------------------------------------------------------------------------

    def encode_row(self, arena_bytes: int, max_items: int) -> Candidate:
        return Candidate(
            self.name,
            usable=True,
            arena_bytes=arena_bytes,
            available_bytes=arena_bytes,
            max_items=max_items,
            instance_id=self.id,
        )

    def text_row(self) -> Candidate:
        assert self.text is not None  # noqa: S101 - it is asked of text instances
        kv_kind = self.text.kv_kind.digest
        traits = TextTraits(prefill_only=not self.role.serves(Stage.DECODE), transfers_kv=True, kv_kind=kv_kind)
        return Candidate(self.name, usable=True, instance_id=self.id, text=traits)

    def encodes_in(self, pool: Pool) -> None:
        """It is in this pool of encoders."""
        self._encodes.append((pool, pool.places[self.name]))

    def serves_in(self, pool: Pool) -> None:
        """It is in this pool of text instances."""
        self._texts.append((pool, pool.places[self.name]))

    def give_item(self, tokens: int, items: int, nbytes: int) -> None:
        """So much more to encode and to hold, or less if negative."""
        for pool, place in self._encodes:
            pool.put(
                place,
                pool.pending_tokens[place] + tokens,
                pool.pending[place] + items,
                pool.available_bytes[place] - nbytes,
                backoff=False,
                probation=False,
            )

    def give_request(self, prefill: int, decode: int, requests: int, kv_tokens: int) -> None:
        """So many more tokens to prefill and to decode, requests, and tokens of KV memory, or fewer if negative."""
        self._prefill_tokens += prefill
        self._decode_tokens += decode
        self._requests += requests
        self._own_kv_tokens += kv_tokens
        tokens = self._prefill_tokens + self._decode_tokens
        for pool, place in self._texts:
            pool.put(place, tokens, self._requests, 0, backoff=False, probation=False)

    @property
    def text_load(self) -> TextLoad:
        room = KvRoom(self.kv_tokens, self._own_kv_tokens, idle=not self._requests).room
        return TextLoad(self._prefill_tokens, self._decode_tokens, room)

    # --- as the simulation sees it -----------------------------------------------------------------------------------

    def load(self) -> InstanceLoad:
        stages: dict[Stage, StageLoad] = {}
        if self.text is not None:
            waiting = self.text.waiting
            stages = stage_loads(
                self.role.stages,
                waiting=waiting,
                running=self.text.visits - waiting,
                tokens=self._prefill_tokens + self._decode_tokens,
                unanswered_tokens=self._prefill_tokens,
                leased_bytes=0,
                free_tokens=None,
            )
        if self.encoder is not None:
            stages[Stage.ENCODE] = StageLoad(0, self.encoder.items)
        return InstanceLoad(stages)

    def until(self, now_s: float) -> dict[Busy, float]:
        """Seconds by kind of work until now."""
        busy_s = self.activity.until(now_s)
        if self.text is not None and (running_s := self.text.busy_s(now_s)):
            busy_s["step"] = busy_s.get("step", 0.0) + running_s
        return busy_s

    def used(self, end_s: float) -> InstanceUse:
        """What it did until the end, which is now."""
        if self.text is not None:
            self.text.settle()
        return self.kind.use(self.id, self.role, 0.0, end_s, self.until(end_s))
