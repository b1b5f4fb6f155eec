"""The plan that a pool manager in a container follows (``--plan``): a copy in which paths are those of the container."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from triptych.cli.outcome import CliError
from triptych.cli.plan.cluster import PlannedCluster
from triptych.cli.plan.manifests import model_directory
from triptych.domain.profile import Origin
from triptych.files import BadFile, read_text
from triptych.runtime.plans import BadPlan, PlanRecord, read

PLAN, PROFILES = "/plan", "/profiles"
"""Directories in containers."""
_PLAN, _CATALOGUE = "plan/plan.json", "plan/catalogue.toml"
"""Files, of the root in containers and of the directory that is written."""
_MAX_CATALOGUE_NBYTES = 1 << 20


def followed_files(cluster: PlannedCluster) -> Mapping[str, str]:
    """Texts of the files in the directory ``plan``, by path; none if no plan is followed. Raises CliError."""
    if (given := cluster.settings["pool_manager"].get("plan")) is None:
        return {}
    try:
        plan = read(Path(given))
        catalogue = plan.common.get("catalogue")
        files = {} if catalogue is None else {_CATALOGUE: read_text(Path(catalogue), _MAX_CATALOGUE_NBYTES)}
    except (BadPlan, BadFile) as error:
        raise CliError(f"--plan={given}: {error}", caller=True) from None
    return {_PLAN: _moved(plan, cluster).dump(), **files}


def _moved(plan: PlanRecord, cluster: PlannedCluster) -> PlanRecord:
    """The plan with the paths of a container. Its mix is known, so that a trace is not read again. Measured profiles are given; what
    was computed is computed again.
    """
    common = {name: value for name, value in plan.common.items() if name != "profiles"}
    if "catalogue" in common:
        common["catalogue"] = f"/{_CATALOGUE}"
    if any(profile.measured.origin is Origin.MEASURED for profile in cluster.profiles):
        common["profiles"] = PROFILES
    workload = {name: value for name, value in plan.workload.items() if name != "trace"}
    return replace(plan, model=model_directory(cluster), common=common, workload=workload)


def manager_settings(cluster: PlannedCluster) -> dict[str, str]:
    """The pool manager's settings in a container."""
    settings = dict(cluster.settings["pool_manager"])
    return {**settings, **({"plan": f"/{_PLAN}"} if "plan" in settings else {}), "profiles": PROFILES}
