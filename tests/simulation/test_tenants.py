"""Several tenants at one router: the real services under virtual time."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from statistics import quantiles

import pytest

from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, now_s, simulate
from tests.simulation.test_ordering import asked
from tests.simulation.workload import Ask, Reply, play
from triptych.domain.sampling import SamplingParams
from triptych.domain.tenant import Tenant
from triptych.errors import DeadlineExceeded, Overloaded
from triptych.machine.encoder.batch_queue import BatchLimits
from triptych.policy.fairness import RESERVED_SHARE
from triptych.policy.policies import PolicyNames

LASTS_S = 12.0
SETTLED_S = 4.0
"""Requests sent later are measured: what runs when a tenant begins to send is not interrupted."""
TEXT_PER_S = 20.0
"""About what a text engine bears that computes 96 answers of 4 to 11 tokens together, with 600 ms per step."""
IMAGES_PER_S = 14.0
"""About what an encoder bears that takes 0.25 ms per token and 5 ms per batch, of images of 256 tokens."""
OTHERS = 3
HOG = "hog"


def text_world(tenants: str = "weighted", ordering: str = "slo") -> World:
    policies = PolicyNames(tenants=tenants, ordering=ordering)
    return World(seed=7, encoders=1, max_running=96, text_step_s=0.6, router={"policies": policies})


def few_places() -> World:
    return World(seed=7, encoders=1, max_running=16, text_step_s=0.08, text_prefill_token_s=0.01)


def little_memory(tenants: str = "weighted", *, kv_tokens: int) -> World:
    """Prompts wait at the router for KV memory of the instance that decodes."""
    policies = PolicyNames(tenants=tenants)
    return World(
        seed=9,
        encoders=1,
        texts=0,
        prefills=1,
        decodes=1,
        kv_tokens=kv_tokens,
        text_step_s=0.1,
        router={"policies": policies},
    )


def image_world(tenants: str = "weighted", ordering: str = "slo") -> World:
    return World(
        seed=8,
        encoders=1,
        encode_token_s=0.00025,
        text_step_s=0.4,
        encoder={"batches": BatchLimits(max_batch_items=1)},
        router={"policies": PolicyNames(tenants=tenants, ordering=ordering)},
    )


def sent_by(
    tenant: str,
    per_s: float,
    *,
    images: bool,
    weight: float = 1.0,
    timeout_s: float = 20.0,
    from_s: float = 0.0,
    priority: int = 0,
    draw: str = "",
) -> list[Ask]:
    """A Poisson process, of which ``draw`` names another one."""
    rng, asks = Random(f"{tenant} {per_s} {images}{draw}"), list[Ask]()
    at_s = from_s + rng.expovariate(per_s)
    while at_s < LASTS_S:
        seed = rng.randrange(1 << 20) if images else rng.randrange(30)
        ask = asked(tenant, at_s, sides_px=(224,) if images else (), timeout_s=timeout_s, seed=seed, priority=priority)
        request = replace(
            ask.request,
            request_id=f"{tenant}-{len(asks)}",
            sampling=SamplingParams(temperature=0, max_tokens=16),
            tenant=Tenant(tenant, weight),
        )
        asks.append(replace(ask, request=request))
        at_s += rng.expovariate(per_s)
    return asks


@dataclass(frozen=True)
class Served:
    """One tenant's requests."""

    ttfts_s: list[float]
    refused: int
    late: int
    in_time: int
    """Requests that were answered while requests came."""

    @property
    def p99_s(self) -> float:
        return quantiles(self.ttfts_s, n=100, method="inclusive")[98]


def run(world: World, *streams: list[Ask]) -> Mapping[str, Served]:
    replies: list[Reply] = []
    began_s = 0.0

    async def scenario(cluster: SimCluster) -> None:
        nonlocal began_s
        began_s = now_s()
        replies.extend(await play(cluster.router, sorted((ask for stream in streams for ask in stream), key=_sent_at)))
        cluster.router.attainment.validate()

    simulate(world, scenario)
    check_right([reply for reply in replies if not isinstance(reply.error, Overloaded | DeadlineExceeded)])
    found: dict[str, list[Reply]] = {}
    for reply in replies:
        found.setdefault(reply.ask.request.request_id.rpartition("-")[0], []).append(reply)
    return {
        name: Served(
            [
                reply.first_s - began_s - reply.ask.at_s
                for reply in own
                if reply.first_s is not None and reply.ask.at_s > SETTLED_S
            ],
            sum(isinstance(reply.error, Overloaded) for reply in own),
            sum(isinstance(reply.error, DeadlineExceeded) for reply in own),
            sum(reply.error is None and reply.ended_s - began_s < LASTS_S for reply in own),
        )
        for name, own in found.items()
    }


def _sent_at(ask: Ask) -> float:
    return ask.at_s


def others(per_s: float, *, images: bool, draw: str = "") -> list[list[Ask]]:
    """Tenants that each send 50 to 75 % of its share."""
    each_per_s = 0.5 * per_s / (OTHERS + 1)
    return [sent_by(f"other{number}", each_per_s, images=images, draw=draw) for number in range(OTHERS)]


def p99_of_others_s(served: Mapping[str, Served]) -> float:
    return quantiles(
        [s for name, tenant in served.items() if name != HOG for s in tenant.ttfts_s], n=100, method="inclusive"
    )[98]


@pytest.mark.parametrize(
    ("images", "per_s"),
    [pytest.param(False, TEXT_PER_S, marks=pytest.mark.extended), (True, IMAGES_PER_S)],
    ids=["text", "images"],
)
def test_one_tenant_at_ten_times_its_share_hardly_moves_the_others(images: bool, per_s: float) -> None:
    make = image_world if images else text_world
    background = others(per_s, images=images)
    hog = sent_by(HOG, 10 * per_s / (OTHERS + 1), images=images, timeout_s=6.0)
    without = p99_of_others_s(run(make(), *background))
    beside = run(make(), *background, hog)
    untold = p99_of_others_s(run(make("none"), *background, hog))
    assert p99_of_others_s(beside) <= 1.2 * without
    assert beside[HOG].in_time > 0.15 * LASTS_S * per_s, "what the others leave is the hog's"
    assert untold > 1.5 * p99_of_others_s(beside)


@pytest.mark.parametrize(
    ("images", "kv_tokens"),
    [(False, 600), pytest.param(True, 4000, marks=pytest.mark.extended)],
    ids=["text", "images"],
)
def test_what_waits_for_kv_memory_waits_by_shares(images: bool, kv_tokens: int) -> None:
    per_s = 12.0
    background = others(per_s, images=images)
    hog = sent_by(HOG, 10 * per_s / (OTHERS + 1), images=images)
    beside, untold = (
        run(little_memory(sharing, kv_tokens=kv_tokens), *background, hog) for sharing in ("weighted", "none")
    )
    assert p99_of_others_s(beside) < p99_of_others_s(untold) / 3
    served, told_nothing = (sum(tenant.in_time for tenant in of.values()) for of in (beside, untold))
    assert served >= 0.98 * told_nothing, "no memory is left unused for that"


def test_where_places_are_few_some_are_left_to_those_within_their_shares() -> None:
    """A step takes as long for each of its prompts as for all answers together, and nothing that runs is interrupted."""
    per_s, without_s, beside_s = 8.0, 0.0, 0.0
    for draw in ("", " 1", " 2"):  # a P99 of one draw is moved by single requests
        background = others(per_s, images=False, draw=draw)
        hog = sent_by(HOG, 10 * per_s / (OTHERS + 1), images=False, draw=draw)
        without_s += p99_of_others_s(run(few_places(), *background))
        beside = run(few_places(), *background, hog)
        beside_s += p99_of_others_s(beside)
        alone = run(few_places(), hog)[HOG].in_time
        assert sum(tenant.in_time for tenant in beside.values()) >= 0.9 * alone
    assert beside_s <= 1.8 * without_s, "it would be over 2 if the hog took all places"


@pytest.mark.parametrize(
    ("images", "per_s"),
    [
        pytest.param(False, TEXT_PER_S, id="text"),
        pytest.param(True, IMAGES_PER_S, id="images", marks=pytest.mark.extended),
    ],
)
def test_tenants_that_want_more_get_the_service_by_their_weights(images: bool, per_s: float) -> None:
    """Weights alone decide, not what a tenant sends or which deadlines it sets."""

    def make() -> World:
        world = (image_world if images else text_world)(ordering="first-come")
        return replace(world, max_running=8, text_step_s=0.05)

    light = sent_by("light", 3 * per_s, images=images, timeout_s=10.0)
    heavy = sent_by("heavy", 1.5 * per_s, images=images, weight=3.0, timeout_s=15.0)
    served = run(make(), light, heavy)
    assert 2.2 <= served["heavy"].in_time / served["light"].in_time <= 4.5
    alone = run(make(), light)
    left_free = (
        0 if images else 1 / RESERVED_SHARE
    )  # of an engine's places, while all tenants want more than their shares
    used = sum(tenant.in_time for tenant in served.values()) / alone["light"].in_time
    assert used >= 0.96 - left_free, "nothing else is left unused"


def test_a_tenant_that_comes_later_passes_what_waits_of_one_that_was_alone() -> None:
    burst = sent_by(HOG, 10 * TEXT_PER_S, images=False)
    burst = [replace(ask, at_s=0.0) for ask in burst if ask.at_s < 1.5]
    late = sent_by("late", 0.25 * TEXT_PER_S, images=False, from_s=SETTLED_S)
    served = run(text_world(ordering="first-come"), burst, late)
    assert len(served[HOG].ttfts_s) == 0
    assert served["late"].p99_s < 2.0
    assert run(text_world("none", "first-come"), burst, late)["late"].p99_s > 4.0


def test_a_cluster_with_one_tenant_serves_in_the_order_of_one_without_tenants() -> None:
    def told(tenants: str) -> list[tuple[float, str, str]]:
        decisions: list[tuple[float, str, str]] = []

        async def scenario(cluster: SimCluster) -> None:
            mixed = sent_by(HOG, 3 * IMAGES_PER_S, images=True) + sent_by(HOG, 3 * TEXT_PER_S, images=False)
            asks = [replace(ask, at_s=ask.at_s / 8) for ask in sorted(mixed, key=_sent_at)[::8]]
            named = [
                replace(ask, request=replace(ask.request, request_id=str(number))) for number, ask in enumerate(asks)
            ]
            await play(cluster.router, named)
            decisions.extend(cluster.decisions)

        simulate(image_world(tenants), scenario)
        return decisions

    assert told("weighted") == told("none")
