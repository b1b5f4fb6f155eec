"""What the driver of machines cannot do: it is refused before anything runs, and services do it."""

from collections.abc import Iterator

from triptych.workload.requests import Plan, WorkloadError

from ..scenario import Deployment  # noqa: TID252 - of the simulator


class NotByMachines(WorkloadError):
    """The machines fidelity does not have it. The message names what, and what has it."""


def check(deployment: Deployment, plan: Plan) -> None:
    """Raises NotByMachines."""
    if lacking := list(dict.fromkeys(_lacking(deployment, plan))):
        raise NotByMachines(f"--fidelity machines does not have {', '.join(lacking)}: use --fidelity services")


def _lacking(deployment: Deployment, plan: Plan) -> Iterator[str]:
    policies = deployment.router.policies
    if deployment.scales:
        yield "autoscaling"
    if any(settings.switchable is not None for settings in deployment.texts.values()):
        yield "instances that switch"
    if deployment.faults:
        yield "faults"
    if any(planned.videos for planned in plan.requests):
        yield "videos"
    if any(planned.sounds_s for planned in plan.requests):
        yield "sounds"
    if policies.dispatch != "complete":
        yield f"dispatch={policies.dispatch}"
    if policies.lending != "always":
        yield f"lending={policies.lending}"
    if policies.prefixes != "never":
        yield f"prefixes={policies.prefixes}"
    if policies.kv_transfer != "never":
        yield f"kv-transfer={policies.kv_transfer}"
    if any(settings.stream_interval_s for settings in deployment.texts.values()):
        yield "stream-interval-s"
    if any(settings.kv_prefixes for settings in deployment.texts.values()):
        yield "kv-prefixes"
    if deployment.encoder.embedding_files is not None:
        yield "embedding-files"
    if any(not settings.kv_arena_bytes for settings in deployment.texts.values()):
        yield "kv-arena-bytes 0"
