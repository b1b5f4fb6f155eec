"""Facts of each pool by its profiles: the load that one instance bears, how long a queue may be, and how long a start
takes.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeVar

from triptych.domain.decision import PoolFacts
from triptych.domain.instance import InstanceLimits, ServedPart
from triptych.domain.pool import MemberStatus, PoolStatus
from triptych.domain.scaling import PoolName
from triptych.domain.slo import Slo
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.domain.windows import ClassWindow
from triptych.machine.pool_manager.demand import Facts
from triptych.policy.capacity import TextLimits
from triptych.policy.costs import Costs
from triptych.policy.pool_facts import (
    EncoderLimits,
    Profiles,
    better_encoder_batch,
    better_encoder_degree,
    better_text_batch,
    better_text_degree,
    encoder_facts,
    encoder_sizing,
    hybrid_facts,
    text_facts,
    text_sizing,
)
from triptych.policy.scaling import colocation
from triptych.policy.sizing import BatchChange, DegreeChange
from triptych.runtime.profiles import KnownProfiles

T = TypeVar("T")
K = TypeVar("K")
_MAX_POOLS = 1024
_DEGREES = (1, 2, 4, 8)
"""Tensor-parallel degrees whose profiles are compared."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Kind of instance: the models' parts that it runs."""

    encoder: ServedPart | None = None
    decoder: ServedPart | None = None
    kv_tokens: int = 0

    @classmethod
    def of(cls, member: MemberStatus) -> "_Kind":
        """With the limits of batches that the member reports."""
        limits = InstanceLimits() if member.load.limits is None else member.load.limits.limits
        parts = {part.identity.part: limits.of(part) for part in member.registration.parts}
        return cls(parts.get(ModelPart.ENCODER), parts.get(ModelPart.DECODER), member.registration.kv_tokens)

    @property
    def key(self) -> Hashable:
        """The same for equal kinds only."""
        parts = (self.encoder, self.decoder)
        return self.kv_tokens, *(
            None if part is None else (part.identity.key, part.max_batch, part.token_budget, part.prepare_cores)
            for part in parts
        )


class Capacities:
    """Facts about the pools, from the profiles that fit what their instances say they run.

    A pool without instances has the facts of its last ones, so that it can grow again.
    """

    def __init__(self, profiles: KnownProfiles, *, host_devices: int = 0) -> None:
        """``host_devices``: accelerators of one host, 0 if unknown."""
        self._profiles = profiles
        self._host_devices = host_devices
        self._kinds: dict[PoolName, tuple[_Kind, bool]] = {}
        """The commonest kind of each pool's instances, and whether it is the only one."""
        self._objectives: dict[str, tuple[tuple[str, ...], bool]] = {}
        """The commonest objectives of each model's routers, and whether they are the only ones."""

    def observe(self, pools: Sequence[PoolStatus]) -> None:
        """The members now."""
        for pool in pools:
            if not pool.members:
                continue
            if (name := pool.name) is None:
                self._objectives[pool.model] = _commonest([member.registration.slo for member in pool.members], tuple)
            else:
                kinds = [_Kind.of(member) for member in pool.members]
                self._kinds[name] = _commonest(kinds, lambda kind: kind.key)
        _forget_oldest(self._kinds)
        _forget_oldest(self._objectives)

    def facts(self, name: PoolName) -> Facts:
        """Facts of a pool, given the mix of a window. Missing facts are named, also why they are."""
        return partial(self._facts, name)

    def _facts(self, name: PoolName, classes: Mapping[str, ClassWindow]) -> PoolFacts:
        kind, alike = self._kinds.get(name, (_Kind(), True))
        encodes, generates = name.role.serves(Stage.ENCODE), name.role is not Role.E
        encoder = kind.encoder if encodes else self._other(name.model, ModelPart.ENCODER)
        decoder = kind.decoder if generates else self._other(name.model, ModelPart.DECODER)
        profiles = Profiles(self._costs(encoder), self._costs(decoder))
        slo, agreed = self._objectives.get(name.model, ((), True))
        try:
            facts = _known(name.role, profiles, _parsed(slo), classes, kind)
        except ValueError as error:  # a profile without the tables that this mix needs
            facts = PoolFacts(missing=(str(error),))
        missing = facts.missing
        if self._profiles and ((encodes and encoder is None) or (generates and decoder is None)):
            missing += ("parts of the model: the instances do not say which they run",)
        if not alike:
            missing += ("capacities of other instances of the pool: all count like the commonest",)
        if not agreed:
            missing += ("objectives of some routers: all count like the commonest",)
        starts = _start_s(
            profiles, encoder=encodes or kind.encoder is not None, text=generates or kind.decoder is not None
        )
        return replace(facts, missing=missing, start_s=starts)

    def advice(self, name: PoolName, classes: Mapping[str, ClassWindow]) -> tuple[str, ...]:
        """Advice on the best batch and tensor-parallel degree of the pool's instances under this mix, and on how hosts
        are filled.

        It follows ModServe (sections 4.2 and 4.3), as far as profiles tell. There is none for roles but E and PD.
        """
        kind, encoder, decoder = self._parts(name)
        if name.role not in (Role.E, Role.PD) or (encoder if name.role is Role.E else decoder) is None:
            return ()
        slo, degrees, (items, text) = self._slo(name), self._by_degree(encoder, decoder), _limits(kind)
        try:
            if name.role is Role.E:
                sizing = encoder_sizing(degrees, slo, classes, limits=items, most=_most_items(degrees))
                now = items.max_items
            else:
                sizing = text_sizing(degrees, slo, classes, limits=text, most=_most_sequences(degrees))
                now = text.max_sequences
        except ValueError:  # a profile without the tables that this mix needs: ``facts`` names it
            return ()
        if sizing is None:
            return ()
        best = (
            f"best size: tensor-parallel degree {sizing.tensor_parallel}, {sizing.reason}; now batches have up to {now}"
        )
        return (best, *self._hosts(encoder, decoder))

    def better_batch(self, name: PoolName, classes: Mapping[str, ClassWindow]) -> BatchChange | None:
        """The largest batch that the pool's instances should have, with the degree that they have; None to leave it. Roles E, P, D
        and PD only: the batches of others share a device.
        """
        kind, encoder, decoder = self._parts(name)
        if (kind.encoder if name.role is Role.E else kind.decoder) is None:
            return None
        slo, profiles, (items, text) = (
            self._slo(name),
            Profiles(self._costs(encoder), self._costs(decoder)),
            _limits(kind),
        )
        try:
            if name.role is Role.E:
                return better_encoder_batch(profiles, slo, classes, limits=items, most=_most_items({0: profiles}))
            if name.role.serves(Stage.ENCODE):
                return None
            most = _most_sequences({0: profiles})
            return better_text_batch(profiles, slo, classes, limits=text, most=most, role=name.role)
        except ValueError:  # a profile without the tables that this mix needs: ``facts`` names it
            return None

    def better_degree(self, name: PoolName, classes: Mapping[str, ClassWindow]) -> DegreeChange | None:
        """The tensor-parallel degree that the pool's instances should have; None to leave it. Roles E and PD only."""
        kind, encoder, decoder = self._parts(name)
        part = encoder if name.role is Role.E else decoder
        if name.role not in (Role.E, Role.PD) or part is None:
            return None
        slo, degrees, (items, text) = self._slo(name), self._by_degree(encoder, decoder), _limits(kind)
        now = part.identity.tensor_parallel
        try:
            if name.role is Role.E:
                return better_encoder_degree(degrees, slo, classes, limits=items, now=now, most=_most_items(degrees))
            return better_text_degree(degrees, slo, classes, limits=text, now=now, most=_most_sequences(degrees))
        except ValueError:  # a profile without the tables that this mix needs: ``facts`` names it
            return None

    def _parts(self, name: PoolName) -> tuple[_Kind, ServedPart | None, ServedPart | None]:
        """What the pool's instances are, and the encoder and the decoder that requests pass: those of another pool where it has none."""
        kind, _ = self._kinds.get(name, (_Kind(), True))
        encoder = kind.encoder or self._other(name.model, ModelPart.ENCODER)
        return kind, encoder, kind.decoder or self._other(name.model, ModelPart.DECODER)

    def _slo(self, name: PoolName) -> Slo:
        return _parsed(self._objectives.get(name.model, ((), True))[0])

    def _by_degree(self, encoder: ServedPart | None, decoder: ServedPart | None) -> Mapping[int, Profiles]:
        return {degree: Profiles(self._costs(encoder, degree), self._costs(decoder, degree)) for degree in _DEGREES}

    def _hosts(self, encoder: ServedPart | None, decoder: ServedPart | None) -> tuple[str, ...]:
        if not self._host_devices or encoder is None or decoder is None:
            return ()
        hosts = colocation(
            text_devices=decoder.identity.tensor_parallel,
            encoder_devices=encoder.identity.tensor_parallel,
            host_devices=self._host_devices,
        )
        if hosts is None:
            return ()
        return (
            f"a host of {self._host_devices} devices holds {hosts.text} text instance and {hosts.encoders} encoders",
        )

    def _other(self, model: str, part: ModelPart) -> ServedPart | None:
        """The part as another pool of the model runs it: an objective is divided between both parts."""
        for name, (kind, _) in self._kinds.items():
            identity = kind.encoder if part is ModelPart.ENCODER else kind.decoder
            if name.model == model and identity is not None:
                return identity
        return None

    def _costs(self, part: ServedPart | None, degree: int = 0) -> Costs | None:
        """Costs with the tensor-parallel ``degree``, or its own."""
        if part is None:
            return None
        identity = part.identity
        return self._profiles.costs(replace(identity, tensor_parallel=degree) if degree else identity)


def _known(role: Role, profiles: Profiles, slo: Slo, classes: Mapping[str, ClassWindow], kind: _Kind) -> PoolFacts:
    """Raises ValueError for a profile without the tables that the mix needs."""
    encoder, text = _limits(kind)
    if role is Role.E:
        return encoder_facts(profiles, slo, classes, limits=encoder)
    if role.serves(Stage.ENCODE):
        return hybrid_facts(profiles, slo, classes, encoder=encoder, text=text, role=role)
    return text_facts(profiles, slo, classes, limits=text, role=role)


def _limits(kind: _Kind) -> tuple[EncoderLimits, TextLimits]:
    encoder, text = EncoderLimits(1), TextLimits(1, 1)
    if kind.encoder is not None:
        encoder = EncoderLimits(max(1, kind.encoder.max_batch), max(1, kind.encoder.prepare_cores))
    if kind.decoder is not None:
        sequences, tokens = max(1, kind.decoder.max_batch), max(1, kind.decoder.token_budget)
        text = TextLimits(sequences, tokens, kind.kv_tokens or None)
    return encoder, text


def _most_items(degrees: Mapping[int, Profiles]) -> int:
    """The largest pass of an encoder that was measured."""
    known = (profiles.encoder.profile.encode for profiles in degrees.values() if profiles.encoder is not None)
    return max((row.items for rows in known for row in rows), default=1)


def _most_sequences(degrees: Mapping[int, Profiles]) -> int:
    """The largest step of a decoder that was measured."""
    known = (profiles.text.profile.decode for profiles in degrees.values() if profiles.text is not None)
    return max((row.batch for rows in known for row in rows), default=1)


def _start_s(profiles: Profiles, *, encoder: bool, text: bool) -> float | None:
    """Time from the start of a process with these parts until it serves, seconds. With a second part, that part's
    weights are loaded as well.
    """
    if not text:
        seconds = 0.0 if profiles.encoder is None else profiles.encoder.start_s().value
    else:
        seconds = 0.0 if profiles.text is None else profiles.text.start_s().value
        if seconds and encoder and profiles.encoder is not None:
            seconds += profiles.encoder.profile.measured.load_s
    return seconds or None


def _commonest(values: Sequence[T], key: Callable[[T], Hashable]) -> tuple[T, bool]:
    """The value that is there most often, by ``key``, and whether it is the only one."""
    keys = list(map(key, values))
    counted = Counter(keys)
    return values[keys.index(counted.most_common(1)[0][0])], len(counted) == 1


def _forget_oldest(known: dict[K, T]) -> None:
    while len(known) > _MAX_POOLS:
        del known[next(iter(known))]


@lru_cache(maxsize=256)
def _parsed(slo: tuple[str, ...]) -> Slo:
    return Slo.parse(slo)
