"""Consequences of failures and slow encodes: a backoff of the instance, as far as its pool can do without it."""

from dataclasses import dataclass, field

from triptych.domain.stage import Stage
from triptych.machine.router.cluster_events import ClusterEffect, Logged
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.machine.router.credit_ledger import Credit
from triptych.machine.router.encode_times import EncodeTimes
from triptych.machine.router.health import BackoffReason
from triptych.machine.router.instance import Instance
from triptych.machine.router.instances import ENCODE, Instances
from triptych.policy.ejection import may_eject

_CALL_REASONS = (BackoffReason.ENGINE, BackoffReason.CALLS)
"""A call that succeeds shows that the instance has none of these."""
_SUSPICIOUS = 1.5
"""Times below this multiple of the pool's mean are not examined."""


@dataclass(slots=True)
class PoolHealth:
    """Part of ``machine.router.cluster.ClusterMachine``."""

    instances: Instances
    limits: ClusterLimits
    times: EncodeTimes = field(default_factory=EncodeTimes)

    def failed(self, instance: Instance, stage: Stage, reason: BackoffReason, now_s: float) -> list[ClusterEffect]:
        """Count a failure, and start a backoff if one is due. One engine failure suffices."""
        most = 1 if reason is BackoffReason.ENGINE else self.limits.max_failures_in_row
        return self._back_off(instance, stage, reason, now_s) if instance.failed(stage, reason, most, now_s) else []

    def worked(self, credit: Credit) -> None:
        """Note that its call has succeeded, or begun to."""
        self.instances.by_name[credit.name].worked(credit.stage, *_CALL_REASONS)

    def read(self, credit: Credit) -> None:
        """A reader has its embedding."""
        self.instances.by_name[credit.name].worked(credit.stage, BackoffReason.EMBEDDINGS)

    def encoded(self, number: int, credit: Credit, now_s: float) -> list[ClusterEffect]:
        """Learn from the time of an encode. An encoder that is far slower than the others gets a backoff."""
        encoder, time_s = self.instances.by_name[credit.name], now_s - credit.granted_s
        health = encoder.stages[Stage.ENCODE].health
        if not credit.tokens:
            return []
        if health.reason is None:
            relative = self.times.encoded(encoder.name, credit.tokens, credit.pending_tokens, time_s)
            if relative is None or relative < _SUSPICIOUS:
                encoder.worked(Stage.ENCODE, BackoffReason.LATENCY)
                return []
            slow = self.limits.outlier_factor and self.times.is_slow(
                encoder.name, self._others(encoder), self.limits.outlier_factor
            )
            return self._too_slow(encoder, now_s) if slow else []
        if health.reason is BackoffReason.LATENCY and number in health.probes:
            relative = self.times.relative(credit.pending_tokens, time_s)
            if relative is not None and self.times.was_slow(
                relative, self._others(encoder), self.limits.outlier_factor
            ):
                return self._too_slow(encoder, now_s)
            encoder.worked(Stage.ENCODE, BackoffReason.LATENCY)
        return []

    def overtaken(self, number: int, credit: Credit, now_s: float) -> list[ClusterEffect]:
        """Note that its call was cancelled, as another encoder was faster, though it began later: that counts as a failure."""
        encoder = self.instances.by_name[credit.name]
        health = encoder.stages[Stage.ENCODE].health
        if not credit.working or not credit.tokens:
            return []
        if health.reason is None:
            self.times.took_at_least(credit.tokens, now_s - credit.granted_s)
        elif number not in health.probes:
            return []
        most = self.limits.max_failures_in_row
        due = self.limits.outlier_factor and encoder.failed(Stage.ENCODE, BackoffReason.LATENCY, most, now_s)
        return self._too_slow(encoder, now_s) if due else []

    def _too_slow(self, encoder: Instance, now_s: float) -> list[ClusterEffect]:
        was_well = encoder.stages[Stage.ENCODE].health.reason is None
        effects = self._back_off(encoder, Stage.ENCODE, BackoffReason.LATENCY, now_s)
        if effects:
            self.times.forget(encoder.name)
            if was_well:
                self.times.restart_tails()
        return effects

    def _back_off(self, instance: Instance, stage: Stage, reason: BackoffReason, now_s: float) -> list[ClusterEffect]:
        members = self.instances.pools[self.instances.pool_of(stage)].members.values()
        pool = [member for member in members if member.usable]
        others = sum(member.stages[stage].health.in_backoff(now_s) for member in pool if member is not instance)
        if instance.usable and not may_eject(len(pool), others, self.limits.max_backoff_share):
            return []
        length_s = instance.back_off(
            stage, reason, now_s, first_s=self.limits.first_backoff_s, longest_s=self.limits.longest_backoff_s
        )
        return [Logged(instance.name, f"in backoff for {length_s:g} s: {reason.value}")]

    def _others(self, encoder: Instance) -> list[str]:
        return [
            member.name
            for member in self.instances.pools[ENCODE].members.values()
            if member.usable and member is not encoder
        ]
