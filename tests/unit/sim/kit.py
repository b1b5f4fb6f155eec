"""Deployments of engines with simple costs, for tests of the simulator."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from triptych.domain.scaling import Kind
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.engine.delay import synthetic_decoder_profile, synthetic_encoder_profile
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.services.router.settings import RouterSettings
from triptych.services.text.settings import TextSettings
from triptych.sim.network import LinkSpeed
from triptych.sim.scenario import Deployment, InstanceKind
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.model import FakeFamily
from triptych.workload.requests import Distribution, Mix, Plan, Size, synthetic

FAMILY = FakeFamily(patch_px=28, max_tokens_per_item=4096, context_length=8192)
ENCODE_S, ENCODE_TOKEN_S, PREPARE_S = 0.005, 0.0003, 0.01
STEP_S, SEQUENCE_S, PROMPT_TOKEN_S = 0.015, 0.0003, 0.00008
PROFILES = {
    ModelPart.ENCODER: synthetic_encoder_profile(
        pass_s=ENCODE_S, token_s=ENCODE_TOKEN_S, prepare_s=PREPARE_S, load_s=2.0
    ),
    ModelPart.DECODER: synthetic_decoder_profile(
        step_s=STEP_S, sequence_s=SEQUENCE_S, prefill_token_s=PROMPT_TOKEN_S, load_s=2.0
    ),
}
LINK = LinkSpeed(1e9, 0.0002)
WITHIN_HOST = LinkSpeed(16e9, 0.00005)
CONTROL_S = 0.0003
IMAGE = Size(224, 224)
MIX = Mix(Distribution.parse("0:0.3,1:0.4,3:0.3"), Distribution.parse("64,300"), Distribution.parse("1,20,60"), IMAGE)


def plan(rate: float, requests: int, seed: int = 1, mix: Mix = MIX) -> Plan:
    return synthetic(mix, rate=rate, duration_s=requests / rate, burstiness=1.0, rng=random.Random(seed))


def deployment(
    sizes: Mapping[Role, int] | Mapping[Kind, int],
    *,
    text: Mapping[str, Any] | None = None,
    manager: Mapping[str, Any] | None = None,
    encoder: Mapping[str, Any] | None = None,
    router: Mapping[str, Any] | None = None,
    **others: Any,
) -> Deployment:
    """``text``, ``manager``, ``encoder`` and ``router`` are settings that differ from their defaults."""
    pools = {pool if isinstance(pool, Kind) else Kind(pool): count for pool, count in sizes.items()}
    return Deployment(
        model=replace(FAKE_MODEL, context_length=FAMILY.context_length),
        family=FAMILY,
        sizes=pools,
        kinds={pool: _kind(pool.role) for pool in pools},
        router=RouterSettings(**(router or {})),
        encoder=EncoderSettings(model=Path("model"), **(encoder or {})),
        texts={
            pool: TextSettings(model=Path("model"), role=pool.role, **(text or {}))
            for pool in pools
            if pool.role is not Role.E
        },
        manager=PoolManagerSettings(allow_network=True, **(manager or {})),
        control_s=CONTROL_S,
        **others,
    )


def _kind(role: Role) -> InstanceKind:
    parts = [ModelPart.ENCODER] * role.serves(Stage.ENCODE) + [ModelPart.DECODER] * (role is not Role.E)
    return InstanceKind("device", 1, {part: PROFILES[part] for part in parts}, 4, 8e9, LINK, WITHIN_HOST)
