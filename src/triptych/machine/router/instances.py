"""The instances that a router knows: their membership and states, the pools they form, and the model they serve.

A pool is a query: the instances that get work of a stage. One process is used under one address.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from triptych.domain.instance import InstanceInfo, ModelInfo
from triptych.domain.lora import LoadedLora
from triptych.domain.membership import Member
from triptych.domain.profile import ProfileIdentity
from triptych.domain.stage import ModelPart, Stage
from triptych.domain.timeline import Readiness
from triptych.machine.router.backlogs import Backlogs
from triptych.machine.router.embedding_directory import EmbeddingDirectory
from triptych.machine.router.instance import Instance, Stages
from triptych.machine.router.kept_pool import KeptPool
from triptych.policy.lending import LenderState
from triptych.policy.placement.pool import Pool

ENCODE: Stages = (Stage.ENCODE,)
TEXT: Stages = (Stage.PREFILL, Stage.DECODE)
"""The instances that get prompts: those that prefill. What they decode counts as well, and a credit counts at the first stage."""
ANSWERS: Stages = (Stage.DECODE, Stage.PREFILL)
"""The instances that go on with answers: those that decode. Used where they are not the same as those that prefill."""


@dataclass(slots=True)
class Instances:
    """Part of ``machine.router.cluster.ClusterMachine``, which alone changes it."""

    max_hints: int
    backlogs: Backlogs | None = None
    """What they have to do in predicted seconds; None if no policy needs that."""
    max_keys: int = 0
    by_name: dict[str, Instance] = field(default_factory=dict)
    """By address, in this order."""
    hosts: dict[str, str] = field(default_factory=dict)
    """The hosts of those that offer a transport, by their own ids."""
    model: ModelInfo | None = None
    """The model that they serve; None until one has been seen."""
    pools: dict[Stages, KeptPool] = field(init=False)
    directory: EmbeddingDirectory = field(init=False)
    """Beliefs about which instances hold embeddings."""
    ready_encoders: frozenset[str] = frozenset()
    encoder_lost_s: float = float("-inf")
    """When an encoder was lost last."""
    has_text: bool = False
    """Whether one is usable for prompts."""
    goes_on: bool = False
    """Whether one is usable that goes on with answers."""
    answering: Stages = TEXT
    """The pool that answers go on in."""
    kv_tokens: int = 0
    """Most tokens that a usable instance that decodes can hold for one request; 0 if unknown."""
    kv_block_tokens: int = 0
    """The largest block of their KV memory; 0 if unknown."""
    loras: Mapping[str, LoadedLora] = field(default_factory=dict)
    """The LoRA adapters that are served, by name: encoded if it changes that, prefilled and decoded somewhere, as far as is known. Of several with one name the one
    that most instances have."""
    lora_digests: frozenset[str] = frozenset()
    """Digests of all that are served, under whatever name."""
    arena_bytes: int = 0
    """Of all usable encoders together."""
    parts: dict[ModelPart, ProfileIdentity] = field(default_factory=dict)
    """The parts of the model, as a usable instance runs them, or ran them last."""

    def __post_init__(self) -> None:
        self.directory = EmbeddingDirectory(self.max_hints, self.max_keys)
        predicted = self.backlogs
        of_text = None if predicted is None else predicted.of_text
        self.pools = {
            ENCODE: KeptPool(ENCODE, None if predicted is None else predicted.of_encoder, self.directory.holders),
            TEXT: KeptPool(TEXT, of_text),
            ANSWERS: KeptPool(ANSWERS, of_text),
        }

    # --- membership: ``review`` follows --------------------------------------------------------------------------------

    def join(self, member: Member) -> bool:
        """Add or update a member. Returns whether it is new."""
        instance = self.by_name.get(member.address)
        is_new = instance is None
        if instance is None:
            instance = self.by_name[member.address] = Instance(member)
            self.by_name = dict(sorted(self.by_name.items()))
        instance.member, instance.leaving = member, False
        return is_new

    def leave(self, instance: Instance) -> None:
        """Give an instance no new work."""
        instance.leaving = True
        self.directory.forget(instance.name)
        self.adopt_model()

    def drains(self, name: str) -> bool:
        """Whether it is to end, or is none any more."""
        instance = self.by_name.get(name)
        return instance is None or instance.leaving or instance.draining

    def forget(self, name: str) -> bool:
        """Returns whether it was known."""
        if self.by_name.pop(name, None) is None:
            return False
        self.directory.forget(name)
        self.directory.forget_keys(name)
        self.adopt_model()
        return True

    def see(self, instance: Instance, info: InstanceInfo) -> bool:
        """Store its description. Returns whether the process has restarted."""
        restarted = instance.seen(info)
        if restarted:
            self.directory.forget(instance.name)
            self.directory.forget_keys(instance.name)
        self.adopt_model()
        return restarted

    def adopt_model(self) -> bool:
        """If no instance in use serves the known model, take the one that they serve. Returns whether it changed."""
        served = [
            instance.info.model
            for instance in self.by_name.values()
            if instance.reachable
            and not instance.leaving
            and instance.info is not None
            and instance.member.agrees_with(instance.info)
        ]
        if not served or self.model in served:
            return False
        self.model = served[0]
        return True

    def review(self, now_s: float) -> None:
        """Update all states, as one instance's change may change the model. Only such events visit all instances."""
        self._mark_duplicates()
        instances = self.by_name.values()
        for instance in instances:
            instance.review(self.model)
        self.hosts = {
            instance.info.instance_id: instance.info.offers[0].host
            for instance in instances
            if instance.info is not None and instance.info.offers
        }
        if self.backlogs is not None:
            self.backlogs.review(self.by_name, self.hosts)
        encoders = [
            instance
            for instance in instances
            if instance.info is None or (instance.serves(ENCODE) and not instance.duplicate)
        ]
        self.pools[ENCODE].set_members(encoders)
        self._review_texts([instance for instance in instances if not instance.duplicate])
        for kept in self.pools.values():
            kept.pool.hosts = self.hosts
        for instance in instances:
            pools = {stages: pool for stages, pool in self.pools.items() if instance.name in pool.members}
            instance.others = tuple((stages, pool.others) for stages, pool in pools.items())
            instance.changed_in = tuple(pool.changed for pool in pools.values())
        ready = frozenset(instance.name for instance in encoders if instance.usable)
        if not self.ready_encoders <= ready:
            self.encoder_lost_s = now_s
        self.ready_encoders = ready
        self.arena_bytes = sum(
            instance.info.arena_bytes for instance in encoders if instance.info is not None and instance.usable
        )
        self._review_loras()
        for instance in instances:
            if instance.info is not None and instance.usable:
                self.parts |= {part.identity.part: part.identity for part in instance.info.parts}

    def _review_texts(self, instances: Sequence[Instance]) -> None:
        """Find who prefills and who decodes. An instance that only prefills is used while another one goes on with its answers."""
        prefill = [instance for instance in instances if instance.serves((Stage.PREFILL,))]
        decode = [instance for instance in instances if instance.serves((Stage.DECODE,))]
        usable = [instance.info for instance in decode if instance.usable and instance.info is not None]
        self.goes_on = any(info.continues for info in usable)
        texts = prefill if self.goes_on else [instance for instance in prefill if instance.serves(TEXT)]
        same = [instance.name for instance in texts] == [instance.name for instance in decode]
        self.answering = TEXT if same else ANSWERS
        self.pools[TEXT].set_members(texts)
        self.pools[ANSWERS].set_members(() if same else decode)
        self.pools[TEXT].pool.answers = self.pools[self.answering].pool
        self.has_text = any(instance.usable for instance in texts)
        kept = [info.kv_tokens for info in usable]
        self.kv_tokens = max(kept, default=0) if all(kept) else 0
        self.kv_block_tokens = max([info.kv_block_tokens for info in usable], default=0)

    def _review_loras(self) -> None:
        """Find the adapters. One whose instances cannot be reached is still known: requests for it fail as others do then."""
        known = [
            instance
            for instance in self.by_name.values()
            if instance.loras
            and not instance.leaving
            and instance.info is not None
            and instance.info.model == self.model
        ]
        encoded, prefilled, decoded = (
            {lora.digest for instance in known if instance.serves((stage,)) for lora in instance.loras}
            for stage in (Stage.ENCODE, Stage.PREFILL, Stage.DECODE)
        )
        texts = [instance for instance in known if instance.served.difference(ENCODE)]
        reports = Counter([lora for instance in texts for lora in instance.loras])
        best = sorted(reports, key=lambda lora: (reports[lora], lora.digest))
        served = [
            lora
            for lora in best
            if lora.digest in (prefilled & decoded & encoded if lora.encodes else prefilled & decoded)
        ]
        self.loras = {lora.name: lora for lora in served}
        self.lora_digests = frozenset([lora.digest for lora in served])

    def lend(self, states: Mapping[str, LenderState]) -> None:
        """Set which text instances encode first; the states are those of now, as long as they are the same mapping."""
        for stages in (TEXT, ANSWERS):
            self.pools[stages].pool.lenders = states

    def _mark_duplicates(self) -> None:
        """Use each process under one address: the one used so far, else the first."""
        used: set[tuple[str, int]] = set()
        for instance in sorted(
            self.by_name.values(), key=lambda candidate: (candidate.duplicate, not candidate.usable)
        ):
            process = instance.process
            instance.duplicate = process in used
            if process is not None:
                used.add(process)

    # --- readers -----------------------------------------------------------------------------------------------------

    def pool_of(self, stage: Stage) -> Stages:
        """The pool whose members serve this stage."""
        return {Stage.ENCODE: ENCODE, Stage.PREFILL: TEXT, Stage.DECODE: self.answering}[stage]

    def pool(self, stages: Stages, now_s: float) -> Pool:
        """The instances for these stages, for policies. The encode pool includes instances not seen yet."""
        if self.backlogs is not None and self.backlogs.refresh():
            for kept in self.pools.values():
                kept.all_changed()
        return self.pools[stages].update(now_s)

    def texts(self, now_s: float) -> Pool:
        """The instances for prompts, with that for answers up to date."""
        if self.answering is not TEXT:
            self.pool(self.answering, now_s)
        return self.pool(TEXT, now_s)

    def states(self) -> dict[tuple[str, ...], int]:
        """Number of instances by role (``E``, ``PD`` ...; empty until it is known) and state."""
        known = [
            ("" if instance.role is None else instance.role.value, instance.state.value)
            for instance in self.by_name.values()
        ]
        return dict(Counter(known))

    def in_backoff(self) -> dict[tuple[str, ...], int]:
        """Number of instances that are in backoff or on probation, by stage and reason."""
        return dict(
            Counter(
                (stage.value, stage_credits.health.reason.name.lower())
                for instance in self.by_name.values()
                for stage, stage_credits in instance.stages.items()
                if stage_credits.health.reason is not None
            )
        )

    def readiness(self) -> Readiness:
        """Whether every stage has a usable instance, and one line per instance seen."""
        lines = tuple(
            f"{instance.info.instance_id}: {instance.state}"
            for instance in self.by_name.values()
            if instance.info is not None
        )
        missing: list[str] = []
        if not self.ready_encoders:
            missing.append(Stage.ENCODE.value)
        if not self.has_text:
            usable = [instance for instance in self.by_name.values() if instance.usable and not instance.duplicate]
            prefills = any(instance.serves((Stage.PREFILL,)) for instance in usable)
            if not prefills:
                missing.append(Stage.PREFILL.value)
            if prefills or not any(instance.serves((Stage.DECODE,)) for instance in usable):
                missing.append(Stage.DECODE.value)
        return Readiness(ready=not missing, missing=tuple(missing), instances=lines)

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        for name, instance in self.by_name.items():
            assert instance.state == instance.state_under(self.model), f"{name}: state"
        for pool in self.pools.values():
            pool.validate()
        used = Counter(
            instance.process for instance in self.by_name.values() if instance.process and not instance.duplicate
        )
        assert all(times == 1 for times in used.values()), "one process is used under two addresses"
        self.directory.validate()
        assert self.directory.encoders <= self.by_name.keys(), "hints to an unknown instance"
