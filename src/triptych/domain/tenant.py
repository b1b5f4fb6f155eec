"""Tenants that share the service, as the router knows them."""

from dataclasses import dataclass

from triptych.domain.bounds import Between, Size

TENANT_NAME = Size(64)
WEIGHT = Between(0.01, 100)


@dataclass(frozen=True, slots=True)
class Tenant:
    """``name`` is no secret: it is in metrics. Of two tenants that both want more, one of twice the weight gets twice as much."""

    name: str = ""
    weight: float = 1.0


NOBODY = Tenant()
"""Tenant of all requests that name none."""
