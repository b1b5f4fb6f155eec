"""Published architectures, as a placement with policies: what ``triptych up --preset`` starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from triptych.cli.outcome import CliError
from triptych.cli.placement import placed
from triptych.domain.slo import Metric, Slo

PresetName = Literal["modserve", "epd", "hydra-ep-d", "hydra-ed-p", "hydra-e-p-d", "hetero", "distserve", "monolith"]


@dataclass(frozen=True, slots=True)
class Preset:
    """Row of the table of presets. ``docs/roles.md`` shows it, with the reasons."""

    roles: str
    """Instances by role, as ``--roles`` has them. ``--roles`` may give other counts of the same roles."""
    routing: str
    """Policy that chooses encoders and text instances."""
    sharding: str
    """Kinds of items that are split over several encoders."""
    ordering: str
    """Order of requests in every queue."""
    tpot_slo_s: float | None
    """Objective from which stages measure their budgets at start; None leaves them at their fixed sizes. A TBT objective in
    seconds (``--slo tbt=50ms``) replaces it.
    """
    lending: str = "always"
    """Rule for text requests to instances that encode as well. ``idle``: items go first there."""
    switching: bool = False
    """Whether instances switch roles."""

    def options(self, slo: Slo) -> dict[str, tuple[str, ...]]:
        """Flags by service. ``slo`` are the router's objectives."""
        routing = (f"--encoder-routing={self.routing}", f"--text-routing={self.routing}")
        router = (*routing, f"--sharding={self.sharding}", f"--lending={self.lending}", f"--ordering={self.ordering}")
        text = () if self.lending == "always" else ("--encode-first",)
        if self.tpot_slo_s is None:
            return {"router": router, "text": text}
        tbt = slo.objective("", Metric.TBT)
        tpot_slo_s = self.tpot_slo_s if tbt is None or tbt.relative else tbt.value
        return {"router": router, "text": (*text, f"--tpot-slo-s={tpot_slo_s:g}")}

    def placed_as(self, roles: str, name: str) -> None:
        """Raises CliError if these are other roles than its own."""
        if placed(roles).keys() != placed(self.roles).keys():
            own_roles = ", ".join(role.value for role in placed(self.roles))
            raise CliError(
                f"--roles {roles}: preset {name} has roles {own_roles}; only their counts can change", caller=True
            )


PRESETS: Mapping[PresetName, Preset] = MappingProxyType(
    {
        "modserve": Preset("E:2,PD:1", "least-loaded", "never", "slo", None),
        "epd": Preset("E:2,P:1,D:1", "least-loaded", "earliest-end", "first-come", None, switching=True),
        "hydra-ep-d": Preset("EP:1,D:1", "least-loaded", "never", "first-come", 0.08),
        "hydra-ed-p": Preset("P:1,ED:1", "least-loaded", "never", "first-come", 0.08),
        "hydra-e-p-d": Preset("E:2,P:1,D:1", "least-loaded", "never", "first-come", 0.08),
        "hetero": Preset("EPD:2,PD:1", "predicted", "never", "first-come", None, "idle"),
        "distserve": Preset("EP:1,D:1", "least-loaded", "never", "first-come", None),
        "monolith": Preset("EPD:1", "least-loaded", "never", "first-come", None),
    }
)
