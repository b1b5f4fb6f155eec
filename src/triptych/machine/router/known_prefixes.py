"""Known prefixes: which segments of a prompt's prefix an instance may pull from others, by what instances tell routers that they hold."""

from collections.abc import Hashable, Sequence

from triptych.domain.instance import InstanceInfo
from triptych.domain.kv_segment import KnownSegment
from triptych.domain.profile import ProfileIdentity
from triptych.domain.stage import ModelPart
from triptych.machine.router.backlogs import CostsOf
from triptych.machine.router.instances import Instances
from triptych.machine.router.prompt_identity import PromptIdentity
from triptych.machine.router.sent_prompts import SentPrompts
from triptych.policy.costs import Costs
from triptych.policy.prefixes import Prefixes, PrefixGain
from triptych.policy.speeds import Pulls

_NONE: tuple[KnownSegment, ...] = ()
_STEPS, _SEGMENTS_PER_STEP = 3, 4
"""Of an instance that decodes meanwhile, beyond those of a prompt that is computed: memory, copies, and the end of the arrival."""


class KnownPrefixes:
    """Part of ``machine.router.text_places.TextPlaces``. What others hold is in the directory."""

    def __init__(self, instances: Instances, policy: Prefixes | None, costs: CostsOf) -> None:
        """Without a policy none are pulled."""
        self._instances = instances
        self._policy = policy
        self._costs_of = costs
        self._sent = SentPrompts()
        self._epochs: dict[str, int] = {}
        self._costs: dict[Hashable, Costs | None] = {}
        self._pulls: Pulls | None = None

    def review(self) -> None:
        """The instances have changed."""
        self._costs.clear()
        self._pulls = None
        epochs = {
            name: instance.info.epoch for name, instance in self._instances.by_name.items() if instance.info is not None
        }
        self._sent.keep([name for name, epoch in epochs.items() if self._epochs.get(name, epoch) == epoch])
        self._epochs = epochs

    def of(self, prompt: PromptIdentity, name: str) -> tuple[KnownSegment, ...]:
        """Segments from the prefix of the prompt on, for the instance at this address, which gets the prompt now; none if it is to
        compute all that it does not have.

        Those that it has cached are among them, as segments must follow each other. It does not pull what it has.
        """
        if self._policy is None:
            return _NONE
        info = self._instances.by_name[name].info
        if info is None or not (info.kv_kind and info.kv_segment_tokens):
            return _NONE
        keys, tokens = prompt.segment_keys(info.kv_kind, info.kv_segment_tokens), info.kv_segment_tokens
        cached = self._sent.cached(name, keys)
        self._sent.sent(name, keys, tokens, info.kv_tokens)
        if cached == len(keys):
            return _NONE
        found = self._found(keys, name, tokens)
        if len(found) <= cached:
            return _NONE
        return (
            found
            if self._policy(self._gain(info, found, cached, self._instances.by_name[name].requests - 1))
            else _NONE
        )

    def _found(self, keys: Sequence[bytes], name: str, tokens: int) -> tuple[KnownSegment, ...]:
        """The longest beginning that is held anywhere. The instance itself, of which the arena may have what it has not cached any
        more, is the last to be asked.
        """
        found: list[KnownSegment] = []
        before = ""
        for at, key in enumerate(keys):
            holders = self._holders(key)
            if not holders:
                break
            others = [holder for holder in holders if holder != name] or [name]
            before = before if before in others else others[0]
            found.append(KnownSegment(before, holders[before], key, at * tokens, tokens))
        return tuple(found)

    def _holders(self, key: bytes) -> dict[str, str]:
        """Ids of the holders, by address. One that drains still lets others read."""
        ids: dict[str, str] = {}
        for holder in self._instances.directory.segment_holders(key):
            instance = self._instances.by_name.get(holder.name)
            if instance is not None and instance.reachable and instance.info is not None:
                ids[holder.name] = instance.info.instance_id
        return ids

    def _gain(self, info: InstanceInfo, found: tuple[KnownSegment, ...], cached: int, requests: int) -> PrefixGain:
        """``requests`` run there beside it: what arrives is copied between two of their steps."""
        size = info.kv_segment_tokens
        first, end = cached * size, len(found) * size
        costs = next(
            (self._costs_for(part.identity) for part in info.parts if part.identity.part is ModelPart.DECODER), None
        )
        compute_s, pull_s = None, self._pull_s(info, found[cached:])
        if costs is not None:
            compute_s = costs.prefill_s(end - first, first).value
            if requests and pull_s is not None:
                steps = _STEPS + -(-(len(found) - cached) // _SEGMENTS_PER_STEP)
                pull_s += steps * costs.decode_s(requests, end).value
        return PrefixGain(end - first, compute_s or None, pull_s)

    def _pull_s(self, info: InstanceInfo, segments: tuple[KnownSegment, ...]) -> float | None:
        """Seconds to pull segments one after the other, though some are pulled at once."""
        if self._pulls is None:
            encoder = self._instances.parts.get(ModelPart.ENCODER)
            self._pulls = Pulls(None if encoder is None else self._costs_for(encoder))
        hosts, nbytes, total_s = self._instances.hosts, info.kv_segment_tokens * info.kv_position_bytes, 0.0
        host = hosts.get(info.instance_id)
        for segment in segments:
            is_near = host is not None and hosts.get(segment.holder) == host
            total_s += self._pulls.pull_s(nbytes if is_near else 0, 0 if is_near else nbytes)
        return total_s or None

    def _costs_for(self, identity: ProfileIdentity) -> Costs | None:
        if (key := identity.key) not in self._costs:
            self._costs[key] = self._costs_of(identity)
        return self._costs[key]
