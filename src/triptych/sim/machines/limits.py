"""Limits of the driver of machines: what it cannot do is refused before anything runs, and services do it."""

from collections.abc import Callable, Mapping

from triptych.workload.requests import WorkloadError

from ..scenario import Deployment  # noqa: TID252 - of the simulator

_LACKING: Mapping[str, Callable[[Deployment], bool]] = {
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
"""By what the message calls it, whether a deployment needs it."""


class NotByMachines(WorkloadError):
    """The machines fidelity does not have it. The message names what, and what has it."""


def check(deployment: Deployment) -> None:
    """Raises NotByMachines."""
    if lacking := [what for what, needs in _LACKING.items() if needs(deployment)]:
        raise NotByMachines(f"--fidelity machines does not have {', '.join(lacking)}: use --fidelity services")
