"""A budget of additional calls, as a share of those that succeed."""

from dataclasses import dataclass


@dataclass(slots=True)
class Budget:
    """A token bucket as in gRPC's retry throttling (A6) and Finagle's retry budgets. Part of
    ``machine.router.cluster.ClusterMachine``.

    When calls fail for everyone nothing is earned, so additional calls end instead of multiplying the load.
    """

    share: float
    """Additional calls that each success earns."""
    most: float
    """Most that can be saved up."""
    left: float
    """Additional calls that may be made now."""

    def earn(self) -> None:
        """A call succeeded."""
        self.left = min(self.most, self.left + self.share)

    def has(self, calls: int) -> bool:
        return self.left >= calls

    def spend(self, calls: int) -> None:
        """``has`` must hold."""
        if not self.has(calls):
            raise ValueError(f"{calls} calls, but only {self.left:g} are left")
        self.left -= calls
