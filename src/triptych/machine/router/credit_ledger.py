"""Ledger of what a router holds at instances: the credits that it has granted there, and leases that no credit covers."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from triptych.domain.embedding import LeaseId
from triptych.domain.item_plan import Content
from triptych.domain.stage import Stage
from triptych.machine.router.instance import Instance
from triptych.machine.router.instances import Instances
from triptych.machine.router.shared_events import Grant
from triptych.policy.placement.items import Why


@dataclass(slots=True)
class Credit:
    """Work that a router counts as given to an instance. Part of ``CreditLedger``."""

    request: int
    name: str
    """The instance's address."""
    stage: Stage
    content: Content | None
    """The item's content; None for a request at a text instance."""
    tokens: int
    """Of the item, 0 if it is encoded with another one; or of the prompt until the first token of its answer."""
    nbytes: int
    with_items: bool = False
    """Whether the request at a text instance has items."""
    output_tokens: int = 0
    """What its answers are expected to have, as it was when the credit was granted."""
    kv_tokens: int = 0
    """KV memory that the request's answer takes, with what is expected of it ..."""
    transfers_kv: bool = False
    """... not there, but where it will be transferred to."""
    why: Why = Why.ROUTED
    prepare_s: float = 0.0
    """Predicted preprocessing of the item, on one core; 0 if unknown."""
    report: int = 0
    """The number of the instance's last report when the credit was granted."""
    working: bool = True
    continues: bool = False
    """Whether some of the request's answer has been sent."""
    early: bool = False
    """For a request whose items are not all encoded: when its answer begins says nothing of the instance."""
    granted_s: float = 0.0
    pending_tokens: int = 0
    """Of the instance at this stage when the credit was granted, these included."""


class CreditLedger:
    """Owner of credits, and of leases that no credit covers.

    Part of ``machine.router.cluster.ClusterMachine``, which alone changes it. It counts credits in their instances.

    A credit's work ends before its bytes are given back, as leases on them last until then. Leases without a credit are those
    on segments of keys and values, those by key, and those that are released after their credit.
    """

    def __init__(self, instances: Instances) -> None:
        self._instances = instances
        self.by_number: dict[int, Credit] = {}
        """Credits that have not been returned, for reading."""
        self.suspects: dict[int, Credit] = {}
        """Credits, by number, of requests that may end their instances, while these work on them and until they have computed something
        of them; for reading."""
        self.leases: dict[str, set[LeaseId]] = {}
        """Leases without a credit, by instance, for reading."""
        self.promised_kv_tokens = 0
        """KV memory for answers that will be transferred, to an instance that is not chosen yet."""
        self._last = 0

    def grant(
        self, credit: Credit, item: int | None, now_s: float, hedge_after_s: float = inf, *, suspect: bool = False
    ) -> Grant:
        """Give it to its instance, which has been described. ``suspect``: the request may end the instance."""
        instance = self._instances.by_name[credit.name]
        if instance.info is None:
            raise AssertionError("a chosen instance has been described")
        self._last += 1
        credit.report = instance.reports
        if credit.content is not None:
            self._instances.directory.began(credit.content, credit.name)
        self.by_number[self._last] = credit
        if suspect:
            self.suspects[self._last] = credit
        if instance.stages[credit.stage].health.reason is not None:
            instance.probe(credit.stage, self._last, now_s)
        here_tokens = 0 if credit.transfers_kv else credit.kv_tokens
        self.promised_kv_tokens += credit.kv_tokens - here_tokens
        instance.give(credit.stage, credit.tokens, credit.nbytes, credit.output_tokens, here_tokens)
        if credit.prepare_s:
            instance.prepares(credit.prepare_s)
        credit.granted_s, credit.pending_tokens = now_s, instance.stages[credit.stage].tokens
        return Grant(self._last, item, credit.name, instance.info.instance_id, credit.why, hedge_after_s)

    def prompt_computed(self, credit: Credit) -> None:
        """Note that the prompt is computed: what is expected of the answer remains, to its end."""
        self._instances.by_name[credit.name].work_done(credit.stage, credit.tokens, credit.report)
        credit.tokens = 0

    def work_ended(self, number: int) -> None:
        """Note that the credit's call is over. Without effect if that is known, or it is returned."""
        credit = self.by_number.get(number)
        if credit is None or not credit.working:
            return
        if credit.content is not None:
            self._instances.directory.ended(credit.content, credit.name)
        credit.working = False
        self.suspects.pop(number, None)
        instance = self._instances.by_name[credit.name]
        instance.work_ended(credit.stage, credit.tokens, credit.report, credit.output_tokens)
        if credit.prepare_s:
            instance.prepares(-credit.prepare_s)
        if instance.stages[credit.stage].health.probes:
            instance.probe_ended(credit.stage, number)

    def suspect(self, request: int) -> None:
        """Note that a request may end the instances that work on it."""
        for number, credit in self.by_number.items():
            if credit.request == request and credit.working:
                self.suspects[number] = credit

    def is_cleared(self, number: int) -> None:
        """Note that the instance has computed something of it."""
        self.suspects.pop(number, None)

    def give_back(self, number: int) -> Credit | None:
        """End it. Returns it, or None if it was returned before."""
        credit = self.by_number.get(number)
        if credit is not None:
            if credit.working:
                self.work_ended(number)
            del self.by_number[number]
            here_tokens = 0 if credit.transfers_kv else credit.kv_tokens
            self.promised_kv_tokens -= credit.kv_tokens - here_tokens
            self._instances.by_name[credit.name].take_back(credit.stage, credit.nbytes, here_tokens, credit.report)
        return credit

    def take_leases(self, name: str, lease_ids: Iterable[LeaseId]) -> None:
        """Count leases at an instance, unless it has been forgotten."""
        if name in self._instances.by_name and (taken := set(lease_ids)):
            self.leases.setdefault(name, set()).update(taken)

    def give_back_leases(self, name: str, lease_ids: Iterable[LeaseId]) -> None:
        """End these leases. Those that are not counted are ignored."""
        if (held := self.leases.get(name)) is not None:
            held.difference_update(lease_ids)
            if not held:
                del self.leases[name]

    def holds(self, instance: Instance) -> bool:
        """Whether anything is held at an instance."""
        return instance.credits > 0 or instance.name in self.leases

    def forget(self, name: str) -> None:
        """End all that is held at an instance that has been forgotten."""
        self.leases.pop(name, None)
        for number in [number for number, credit in self.by_number.items() if credit.name == name]:
            credit = self.by_number.pop(number)
            self.suspects.pop(number, None)
            if credit.working and credit.content is not None:
                self._instances.directory.ended(credit.content, credit.name)
            if credit.transfers_kv:
                self.promised_kv_tokens -= credit.kv_tokens

    def validate(self) -> None:
        """Raise AssertionError where an instance counts other credits than those that it has."""
        for name, instance in self._instances.by_name.items():
            out = {number: credit for number, credit in self.by_number.items() if credit.name == name}
            working = {number: credit for number, credit in out.items() if credit.working}
            assert instance.credits == len(out), f"{name}: credits"
            assert self.holds(instance) or not instance.leaving, f"{name}: leaving with nothing left"
            prepare_us = sum(round(1e6 * credit.prepare_s) for credit in working.values())
            assert instance.own_prepare_us == prepare_us, f"{name}: preprocessing"
            kv_tokens = sum(credit.kv_tokens for credit in out.values() if not credit.transfers_kv)
            assert instance.own_kv_tokens == kv_tokens, f"{name}: KV memory"
            for stage, stage_credits in instance.stages.items():
                running = {number: credit for number, credit in working.items() if credit.stage is stage}
                tokens = sum(credit.tokens for credit in running.values())
                if stage is Stage.DECODE:
                    tokens += sum(credit.output_tokens for credit in working.values())
                nbytes = sum(credit.nbytes for credit in out.values() if credit.stage is stage)
                assert stage_credits.own_tokens == tokens, f"{name}: tokens"
                assert stage_credits.own_pending == len(running), f"{name}: pending"
                assert stage_credits.own_bytes == nbytes, f"{name}: bytes"
                assert stage_credits.health.probes <= running.keys(), f"{name}: probes"
        working = {number: credit for number, credit in self.by_number.items() if credit.working}
        assert self.suspects.items() <= working.items(), "suspects"
        promised = sum(credit.kv_tokens for credit in self.by_number.values() if credit.transfers_kv)
        assert self.promised_kv_tokens == promised, "promises of KV memory"
        known = self._instances.by_name.keys()
        assert {credit.name for credit in self.by_number.values()} <= known, "credits of an unknown instance"
        assert self.leases.keys() <= known, "leases at an unknown instance"
        assert all(self.leases.values()), "no lease is counted as some"
