"""Backlogs: what each instance has to do in predicted seconds: by its profile, else by what its pool's work has taken so far.

What it has to do is known from its load reports and this router's own credits. Predictions change as the router learns, but
only at ``refresh``, so that what policies see of an instance can be kept until then.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field

from triptych.domain.instance import InstanceInfo, ServedPart
from triptych.domain.profile import ProfileIdentity
from triptych.domain.stage import ModelPart, Stage
from triptych.machine.router.instance import Instance
from triptych.machine.router.relative_times import RelativeTimes
from triptych.policy.backlog import EncodeBacklog, TextBacklog
from triptych.policy.costs import Costs
from triptych.policy.placement.wants import Want
from triptych.policy.speeds import EncodeSpeed, LearnedSpeed, Pulls, TextSpeed

CostsOf = Callable[[ProfileIdentity], Costs | None]
"""The costs of a part of the model, as an instance runs it; None where no profile has them."""

_FIRST_REFRESH, _MOST_BETWEEN = 8, 64
"""Observations between two refreshes: it doubles, up to this number."""
_MEAN_WEIGHT = 0.02
"""Of the latest request in the mean length of prompts."""


@dataclass(slots=True)
class _Known:
    """Facts that do not change about an instance. Speeds are by the profiles of what it runs; None where there are none."""

    info: InstanceInfo
    serves: frozenset[Stage]
    encode: EncodeSpeed | None
    text: TextSpeed | None
    host: str
    near_text: bool
    """Whether a text instance is on its host."""


@dataclass(slots=True)
class Backlogs:
    """Part of ``machine.router.instances.Instances``."""

    costs: CostsOf
    encode_times: RelativeTimes
    text_times: RelativeTimes
    """From the grant to the first token."""
    items_first: bool = False
    """Where instances that encode prefill as well: their items go before prompts."""
    _known: dict[str, _Known] = field(default_factory=dict)
    """By instance."""
    _learned: dict[Stage, LearnedSpeed | None] = field(default_factory=dict)
    """As of the last refresh."""
    _prompt_tokens: float = 0.0
    """Mean of the requests dispatched."""
    _context: int = 1
    """The same as a power of two, as of the last refresh."""
    _observed: int = 0
    _between: int = _FIRST_REFRESH

    # --- events ------------------------------------------------------------------------------------------------------

    def review(self, instances: Mapping[str, Instance], hosts: Mapping[str, str]) -> None:
        """Instances have changed. ``hosts`` are known by the instances' own ids."""
        described = [
            (name, info, instance.served)
            for name, instance in instances.items()
            if (info := instance.limited_info) is not None
        ]
        speeds = _Speeds(self.costs, [info for _, info, _ in described])
        text_hosts = {hosts.get(info.instance_id) for _, info, serves in described if Stage.PREFILL in serves}
        self._known = {}
        for name, info, serves in described:
            host = hosts.get(info.instance_id, "")
            near = bool(host) and host in text_hosts
            encode, text = speeds.encode(info, serves), speeds.text(info, serves)
            self._known[name] = _Known(info, serves, encode, text, host, near)

    def prompted(self, tokens: int) -> None:
        """A request with such a prompt is dispatched."""
        self._prompt_tokens += (tokens - self._prompt_tokens) * (_MEAN_WEIGHT if self._prompt_tokens else 1.0)
        self._observed += 1

    def observed(self) -> None:
        """Note that a time has a further value."""
        self._observed += 1

    def refresh(self) -> bool:
        """Use what has been learned, if it is time to. Returns whether predictions may have changed for all instances."""
        if self._observed < self._between:
            return False
        self._observed, self._between = 0, min(2 * self._between, _MOST_BETWEEN)
        before, self._context = self._context, 1 << max(0, round(self._prompt_tokens) - 1).bit_length()
        known = self._known.values()
        unprofiled = {
            Stage.ENCODE: any(Stage.ENCODE in described.serves and described.encode is None for described in known),
            Stage.PREFILL: any(described.serves - {Stage.ENCODE} and described.text is None for described in known),
        }
        for stage, times in ((Stage.ENCODE, self.encode_times), (Stage.PREFILL, self.text_times)):
            if unprofiled[stage]:
                line = times.line()
                self._learned[stage] = None if line is None else LearnedSpeed(line)
        return any(unprofiled.values()) or self._context != before

    # --- predictions -------------------------------------------------------------------------------------------------

    def of_encoder(self, instance: Instance) -> EncodeBacklog | None:
        """None if nothing is known of its speed."""
        known = self._known.get(instance.name)
        if known is None:
            return None
        tokens, speed = instance.pending_tokens(Stage.ENCODE), known.encode
        text = self.of_text(instance) if Stage.PREFILL in known.serves else None
        text_wait_s = None if text is None else text.slowness * text.wait_s
        if speed is None:
            learned = self._learned.get(Stage.ENCODE)
            if learned is None:
                return None
            slowness = self.encode_times.slowness(instance.name)
            return EncodeBacklog(learned, learned.wait_s(tokens), 0.0, slowness, known.near_text, text_wait_s)
        items = instance.pending(Stage.ENCODE)
        wait_s = speed.wait_s(tokens, items)
        if text_wait_s is not None and not self.items_first:
            wait_s += text_wait_s
        prepared_s = speed.prepared_s(instance.prepare_s(items))
        return EncodeBacklog(speed, wait_s, prepared_s, 1.0, known.near_text, text_wait_s)

    def of_text(self, instance: Instance) -> TextBacklog | None:
        """None if nothing is known of its speed."""
        known = self._known.get(instance.name)
        if known is None:
            return None
        tokens, speed = instance.pending_tokens(Stage.PREFILL), known.text
        if speed is None:
            learned = self._learned.get(Stage.PREFILL)
            if learned is None:
                return None
            slowness, instance_id = self.text_times.slowness(instance.name), known.info.instance_id
            return TextBacklog(learned, learned.wait_s(tokens), 0.0, slowness, instance_id, known.host)
        requests = instance.requests
        step_s = speed.step_s(requests, self._context)
        wait_s = speed.wait_s(tokens, requests, instance.pending_tokens(Stage.DECODE), step_s)
        if known.encode is not None:  # a batch of items that runs is not interrupted
            wait_s += known.encode.pass_s(instance.pending_tokens(Stage.ENCODE), instance.pending(Stage.ENCODE))
        return TextBacklog(speed, wait_s, step_s, 1.0, known.info.instance_id, known.host)

    def prepare_s(self, instance: Instance, want: Want) -> float:
        """Preprocessing of an item at an encoder, on one core; 0 if unknown."""
        known = self._known.get(instance.name)
        return 0.0 if known is None or known.encode is None else known.encode.prepare_s(want.work({}))


class _Speeds:
    """Speeds, one for all instances that run the same on the same hardware within the same limits."""

    def __init__(self, costs: CostsOf, infos: Collection[InstanceInfo]) -> None:
        self._costs = costs
        self._encode: dict[Hashable, EncodeSpeed] = {}
        self._text: dict[Hashable, TextSpeed] = {}
        parts = [part for info in infos for part in info.parts if part.identity.part is ModelPart.ENCODER]
        encoders = [found for part in parts if (found := costs(part.identity)) is not None]
        self._pulls = Pulls(next((encoder for encoder in encoders if encoder.profile.transfer), None))
        """Profiles of encoders have the transports."""

    def encode(self, info: InstanceInfo, serves: frozenset[Stage]) -> EncodeSpeed | None:
        part, costs = self._part(info, serves, ModelPart.ENCODER)
        if part is None or costs is None:
            return None
        key = (part.identity.key, part.max_batch, part.prepare_cores)
        if key not in self._encode:
            self._encode[key] = EncodeSpeed(costs, self._pulls, max_batch=part.max_batch, cores=part.prepare_cores)
        return self._encode[key]

    def text(self, info: InstanceInfo, serves: frozenset[Stage]) -> TextSpeed | None:
        part, costs = self._part(info, serves, ModelPart.DECODER)
        if part is None or costs is None:
            return None
        key = (part.identity.key, part.max_batch, part.token_budget)
        if key not in self._text:
            self._text[key] = TextSpeed(
                costs, self._pulls, max_sequences=part.max_batch, token_budget=part.token_budget
            )
        return self._text[key]

    def _part(
        self, info: InstanceInfo, serves: frozenset[Stage], kind: ModelPart
    ) -> tuple[ServedPart | None, Costs | None]:
        for part in info.parts:
            if part.identity.part is kind and serves & _STAGES[kind]:
                return part, self._costs(part.identity)
        return None, None


_STAGES = {
    ModelPart.ENCODER: frozenset({Stage.ENCODE}),
    ModelPart.DECODER: frozenset({Stage.PREFILL, Stage.DECODE}),
}
