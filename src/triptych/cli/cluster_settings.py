"""Settings of ``triptych up``: a placement, and settings of the services. They are checked before anything starts."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triptych.cli.model import Model
from triptych.cli.outcome import CliError
from triptych.cli.presets import Preset
from triptych.cli.process_plan import service_of
from triptych.cli.service_options import Flags, loaded, without_instance_flags
from triptych.domain.pool_sizes import bounds_of, parse_bounds
from triptych.domain.profile import BadProfile
from triptych.domain.scaling import Kind, PoolName
from triptych.domain.slo import Metric, Slo
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.runtime.profiles import KnownProfiles, the_profile
from triptych.runtime.settings import SettingsError
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.services.router.settings import RouterSettings
from triptych.services.text.settings import TextSettings

_MAX_INSTANCES = 8
"""Largest size of a pool by default: a machine has no room for the pool manager's own default."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The models, their instances by role, and the flags of each service that the caller has given.

    ``sizes`` are those of each model's pools at the start. The classes of the services validate the flags together with the
    environment; the rules here are those between services.
    """

    models: Sequence[Model]
    sizes: Mapping[Role, int]
    given: Flags
    preset: Preset | None = None
    autoscale: bool = False
    switch_roles: bool = False
    tiers: Mapping[Kind, int] = field(default_factory=dict)
    """Instances of the tiers of roles that have some: their sum is in ``sizes``."""

    def flags(self, measure: Callable[[], Path] | None = None, *, reprofile: bool = False) -> Flags:
        """Flags of each service, and under ``mounted_encoder`` those of encoders in text processes.

        ``measure`` makes profiles if none are named, once everything else is known to be right. With ``reprofile`` it
        has to. Raises CliError.
        """
        router: RouterSettings = loaded("router", self.given["router"])
        slo = Slo.parse(router.slo)
        preset = {} if self.preset is None else self.preset.options(slo)
        of_router = (*preset.get("router", ()), *self.given["router"])
        of_text = (*preset.get("text", ()), *self.given["text"])
        texts, encoder = self._instances(of_text)
        below = {"max_instances": max(_MAX_INSTANCES, *self.sizes.values())}
        manager: PoolManagerSettings = loaded("pool_manager", self.given["pool_manager"], below)
        self._check_pools(manager)
        if self.switch_roles and not {metric for _, metric in slo.objectives} >= {Metric.TTFT, Metric.TBT}:
            raise _cannot_switch(
                "takes objectives for the time to the first token and between tokens: --slo ttft=5x,tbt=5x"
            )
        delays = next((settings.delay_profile for settings in (*texts, encoder) if settings.delay_profile), None)
        _check_delays(delays)
        profiles = {path: _read(path) for path in (router.profiles, manager.profiles)}
        known = router.profiles or manager.profiles or delays
        if reprofile and (measure is None or known is not None):
            text = "--reprofile is for --autoscale or --switch-roles with the demo model, without other profiles"
            raise CliError(text, caller=True)
        if known is None and measure is not None:
            known = measure()
        router_knows, manager_knows = router.profiles or known, manager.profiles or known
        if self.switch_roles:
            _check_parts(profiles.get(manager_knows) or _read(manager_knows))
        pulling = ("--prefixes=by-cost",) if any(text.kv_prefixes for text in texts) else ()
        return {
            **self.given,
            "text": of_text,
            "mounted_encoder": without_instance_flags(self.given["encoder"]),
            "router": (*_profiles_flag(router_knows), *pulling, *of_router),
            "pool_manager": (
                *_profiles_flag(manager_knows),
                f"--max-instances={manager.control.max_instances}",
                *self.given["pool_manager"],
            ),
        }

    def _instances(self, of_text: Sequence[str]) -> tuple[list[TextSettings], EncoderSettings]:
        """The settings of the text processes of each role, and those of encoders. Raises CliError."""
        path = f"--model={self.models[0].path}"
        texts: list[TextSettings] = []
        for role in self.sizes:
            if service_of(role, switches=self.switch_roles) == "text":
                switchable = (f"--switchable={Role.EPD.value}",) if self.switch_roles else ()
                texts.append(loaded("text", (path, f"--role={role.value}", *switchable, *of_text)))
        encoder: EncoderSettings = loaded("encoder", (path, *self.given["encoder"]))
        mounted = shlex.join(without_instance_flags(self.given["encoder"]))
        for text in texts:
            if text.widest.serves(Stage.ENCODE):
                try:
                    EncoderSettings.mounted(mounted, text)
                except SettingsError as error:
                    raise CliError(f"encoders of role {text.widest.value}: {error}", caller=True) from None
        return texts, encoder

    def _check_pools(self, settings: PoolManagerSettings) -> None:
        """Raise CliError if a pool begins outside its bounds, or bounds are of none that there will be."""
        begins = max(self.sizes.values())
        most, entries = settings.control.max_instances, settings.control.pool_sizes
        if begins > most:
            raise CliError(f"--max-instances {most}: a pool begins with {begins} instances", caller=True)
        kinds = {Kind(role): size for role, size in self.sizes.items()}
        kinds = {kind: size for kind, size in kinds.items() if not any(kind.role is tier.role for tier in self.tiers)}
        kinds |= self.tiers
        pools = {PoolName(model.model_id, *kind): size for model in self.models for kind, size in kinds.items()}
        names = [parse_bounds(entry)[0] for entry in entries]
        for entry, name in zip(entries, names, strict=True):
            if name not in {text for pool in pools for text in (str(pool), pool.kind, pool.role.value)}:
                known_pools = ", ".join(map(str, pools))
                raise CliError(
                    f"--pool-sizes {entry!r}: there will be no such pool; there will be: {known_pools}", caller=True
                )
            if names.count(name) > 1:
                raise CliError(f"--pool-sizes names {name} more than once", caller=True)
        for pool, size in pools.items():
            bounds = bounds_of(pool, entries)
            grows = bounds is not None and self.autoscale and size < bounds.least
            if bounds is not None and not grows and not bounds.least <= size <= bounds.most:
                raise CliError(
                    f"--roles {pool.kind}:{size}: --pool-sizes lets pool {pool} have {bounds.least} to {bounds.most} instances",
                    caller=True,
                )


def _check_delays(delays: Path | None) -> None:
    """Raise CliError unless there is one profile of each part."""
    try:
        if delays is not None:
            for part in ModelPart:
                the_profile(delays, part)
    except BadProfile as error:
        raise CliError(f"--delay-profile {delays}: {error}", caller=True) from None


def _read(path: Path | None) -> KnownProfiles:
    """Raises CliError."""
    try:
        return KnownProfiles.read(path)
    except BadProfile as error:
        raise CliError(f"--profiles {path}: {error}", caller=True) from None


def _profiles_flag(path: Path | None) -> tuple[str, ...]:
    return () if path is None else (f"--profiles={path}",)


def _check_parts(known: KnownProfiles) -> None:
    """Check that the pool manager can tell what an instance bears in each stage. Raises CliError."""
    profiled = {profile.identity.part for profile in known.own}
    if lacking := [part.value for part in ModelPart if part not in profiled]:
        raise _cannot_switch(
            f"takes profiles of the model's {' and '.join(lacking)}: --profiles DIR (triptych profile)"
        )


def _cannot_switch(why: str) -> CliError:
    return CliError(f"to switch roles {why}; --no-switch-roles does without", caller=True)
