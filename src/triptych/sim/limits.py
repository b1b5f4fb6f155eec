"""What the faster fidelities of a simulation do not have: it is refused before anything runs."""

from collections.abc import Callable, Iterable, Mapping

from triptych.workload.fidelity import Fidelity
from triptych.workload.requests import Planned, WorkloadError

from .scenario import Deployment

_BY_SERVICES: Mapping[str, Callable[[Deployment], bool]] = {
    "autoscaling": lambda deployment: deployment.scales,
    "switching (--no-switch-roles turns it off)": lambda deployment: any(
        settings.switchable is not None for settings in deployment.texts.values()
    ),
    "a host's cores": lambda deployment: deployment.host is not None,
    "encoders-on": lambda deployment: deployment.encoders_share is not None,
    "faults": lambda deployment: bool(deployment.faults),
    "dispatch=prefix": lambda deployment: deployment.router.policies.dispatch != "complete",
    "lending": lambda deployment: deployment.router.policies.lending != "always",
    "encode-first": lambda deployment: any(settings.encode_first for settings in deployment.texts.values()),
    "prefixes of other instances": lambda deployment: (
        deployment.router.policies.prefixes != "never"
        or any(settings.kv_prefixes for settings in deployment.texts.values())
    ),
    "stream-interval-s": lambda deployment: any(settings.stream_interval_s for settings in deployment.texts.values()),
    "kv-arena-bytes 0": lambda deployment: not all(settings.kv_arena_bytes for settings in deployment.texts.values()),
    "embedding-files": lambda deployment: deployment.encoder.embedding_files is not None,
}
"""By what the message calls it, whether a deployment needs it. Services alone have these."""
_BY_MACHINES: Mapping[str, Callable[[Deployment], bool]] = {
    "encoder-routing=predicted": lambda deployment: deployment.router.policies.encoder_routing == "predicted",
    "text-routing=predicted": lambda deployment: deployment.router.policies.text_routing == "predicted",
}
"""Queues alone do not have these."""
_TENANTS = "several tenants (--tenants none does not tell them apart)"


class NotSimulated(WorkloadError):
    """The fidelity does not have it. The message names what, and which fidelity has it."""


def check(fidelity: Fidelity, deployment: Deployment, requests: Iterable[Planned] = ()) -> None:
    """Raises NotSimulated for a deployment or requests that the fidelity cannot simulate."""
    if fidelity == "services":
        return
    lacking = [what for what, needs in _BY_SERVICES.items() if needs(deployment)]
    if deployment.router.policies.tenants != "none" and len({planned.tenant for planned in requests}) > 1:
        lacking.append(_TENANTS)
    other = "services" if lacking else "machines"
    if fidelity == "queues":
        lacking += [what for what, needs in _BY_MACHINES.items() if needs(deployment)]
    if lacking:
        raise NotSimulated(f"--fidelity {fidelity} does not have {', '.join(lacking)}: use --fidelity {other}")
