"""Plans as a planner writes them, for commands that read them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.command_line import invoke
from tests.unit.families.test_architecture import PUBLISHED
from tests.unit.runtime.test_plans import PLAN
from triptych.domain.stage import Role
from triptych.runtime.plans import Budget, Candidate, Placement, PlanRecord, write

CONFIG = PUBLISHED["llava-1.5-7b"][1] | {"torch_dtype": "float16"}


def triptych(*arguments: object, status: int = 0) -> str:
    """What a command prints on both outputs."""
    result = invoke([str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


def placement(roles: Mapping[str, int], device: str = "cpu", **more: Any) -> Placement:
    """Instances by role on devices of one kind, or of ``devices``."""
    kinds = more.pop("devices", {})
    of_role = {Role(letters): count for letters, count in roles.items()}
    return Placement(
        roles=of_role,
        devices={role: kinds.get(role.value, device) for role in of_role},
        degrees=more.pop("degrees", dict.fromkeys(of_role, 1)),
        prepare_cores=more.pop("prepare_cores", 2),
        **more,
    )


def plan_of(placed: Placement, *, model: str = "demo", **more: Any) -> PlanRecord:
    """A plan whose only candidate is this placement."""
    candidate = Candidate(placed, PLAN.candidates[0].predicted, meets=True)
    fields = {
        "model_id": "triptych-demo" if model == "demo" else "llava",
        "common": {},
        "workload": {"rate": "2", "images": "1", "duration": "5"},
        "budget": Budget(dict.fromkeys(placed.device_counts), None, 2.0),
        "rejected": (),
    }
    return replace(PLAN, model=model, candidates=(candidate,), **{**fields, **more})


def written(folder: Path, plan: PlanRecord) -> Path:
    path = folder / "plan.json"
    write(path, plan)
    return path


def config(folder: Path) -> Path:
    """The configuration of LLaVA 1.5 with 7 billion parameters, without weights."""
    path = folder / "llava" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(CONFIG))
    return path
