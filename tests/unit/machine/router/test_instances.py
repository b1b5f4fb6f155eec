from dataclasses import replace

from tests.unit.policy.profiles import ENCODER
from triptych.domain.embedding import DType
from triptych.domain.instance import InstanceInfo, ModelInfo, ServedPart, TransportOffer
from triptych.domain.membership import Member
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.machine.router.backlogs import Backlogs
from triptych.machine.router.instances import ANSWERS, ENCODE, TEXT, Instances
from triptych.machine.router.relative_times import RelativeTimes

MODEL = ModelInfo("m", "r", DType.F32, 8, 100)
OTHER = replace(MODEL, revision="s")
ROLES = {"e": Role.E, "t": Role.PD, "h": Role.EPD, "p": Role.P, "d": Role.D}
CAT = (b"cat", b"")


def info(name: str, *, model: ModelInfo = MODEL, epoch: int = 1, kv_tokens: int = 10) -> InstanceInfo:
    return InstanceInfo(f"i-{name}", epoch, ROLES[name], model, 100, (), kv_tokens=kv_tokens)


def instances(*names: str, seen: bool = True) -> Instances:
    made = Instances(max_hints=2)
    for name in names:
        assert made.join(Member(name))
        if seen:
            made.see(made.by_name[name], info(name))
    made.review(0.0)
    made.validate()
    return made


def usable(made: Instances) -> tuple[list[str], list[str]]:
    pools = [made.pool(stages, 0.0) for stages in (ENCODE, TEXT)]
    return tuple([candidate.name for candidate in pool.candidates if candidate.usable] for pool in pools)  # type: ignore[return-value]


def test_pools_are_queries_by_stage() -> None:
    made = instances("t", "h", "e")
    assert usable(made) == (["e", "h"], ["h", "t"])
    assert (made.model, made.kv_tokens, made.has_text) == (MODEL, 10, True)
    assert made.readiness().ready


def test_what_was_not_seen_may_encode_but_is_not_usable() -> None:
    made = instances("e", "t", seen=False)
    assert made.pool(ENCODE, 0.0).name == ["e", "t"]
    assert usable(made) == ([], [])
    assert made.states() == {("", "not seen yet"): 2}


def test_a_member_joins_once() -> None:
    made = instances("e")
    made.leave(made.by_name["e"])
    assert not made.join(Member("e"))
    made.review(0.0)
    assert usable(made) == (["e"], [])


def test_hints_end_with_the_process_that_they_name_or_when_it_leaves() -> None:
    made = instances("e", "h")
    for name in ("e", "h"):
        made.directory.remember(CAT, name)
    assert {holding.name for holding in made.pool(ENCODE, 0.0).held(CAT)} == {"e", "h"}
    assert made.see(made.by_name["e"], info("e", epoch=2)), "it has restarted"
    assert [holding.name for holding in made.pool(ENCODE, 0.0).held(CAT)] == ["h"]
    made.leave(made.by_name["h"])
    assert not made.pool(ENCODE, 0.0).held(CAT)


def test_another_model_is_adopted_once_nothing_serves_the_known_one() -> None:
    made = instances("e", "t")
    made.see(made.by_name["t"], info("t", model=OTHER))
    made.review(1.0)
    assert (made.model, usable(made)) == (MODEL, (["e"], []))
    assert made.forget("e")
    assert not made.forget("e")
    made.review(2.0)
    assert (made.model, usable(made)) == (OTHER, ([], ["t"]))


def test_when_an_encoder_was_lost_last_is_known() -> None:
    made = instances("e", "t")
    made.by_name["t"].reachable = False
    made.review(1.0)
    assert made.encoder_lost_s == float("-inf")
    made.by_name["e"].reachable = False
    made.review(2.0)
    made.review(3.0)
    assert made.encoder_lost_s == 2.0


def test_one_process_is_used_under_the_address_used_so_far() -> None:
    made = instances("t")
    made.join(Member("h"))
    made.see(made.by_name["h"], info("t"))
    made.review(0.0)
    assert usable(made) == ([], ["t"])
    made.by_name["t"].reachable = False
    made.review(0.0)
    assert usable(made) == ([], ["h"])


def test_the_model_of_one_that_cannot_be_reached_is_given_up_for_that_of_the_first_that_can() -> None:
    made = instances("e", "h", "t")
    made.see(made.by_name["t"], info("t", model=replace(MODEL, revision="last")))
    made.see(made.by_name["h"], info("h", model=OTHER))
    assert not made.adopt_model(), "one serves it"
    made.by_name["e"].reachable = False
    assert made.adopt_model()
    assert made.model == OTHER


def test_work_shows_in_every_pool_that_an_instance_is_in() -> None:
    made = instances("e", "h")
    assert made.pool(ENCODE, 0.0).pending_tokens == made.pool(ENCODE, 0.0).pending_tokens == [0, 0]
    made.by_name["h"].give(Stage.ENCODE, 5, 0)
    made.by_name["h"].give(Stage.PREFILL, 7, 0)
    assert made.pool(ENCODE, 0.0).pending_tokens == [0, 5]
    assert made.pool(TEXT, 0.0).pending_tokens == [7]
    made.validate()


def test_where_answers_go_on_elsewhere_their_pool_is_as_current_as_that_of_prompts() -> None:
    made = instances("p", "d", seen=False)
    for name in "pd":
        made.see(made.by_name[name], replace(info(name), continues=True, kv_block_tokens=16))
    made.review(0.0)
    assert (made.answering, made.kv_tokens, made.kv_block_tokens) == (ANSWERS, 10, 16)
    assert made.texts(0.0).answers.pending_tokens == [0]
    made.by_name["d"].give(Stage.DECODE, 5, 0)
    prompts = made.texts(0.0)
    assert (prompts.name, prompts.answers.name, prompts.answers.pending_tokens) == (["p"], ["d"], [5])


def test_what_a_request_may_take_of_kv_memory_is_unknown_where_one_does_not_say() -> None:
    made = instances("h", "t")
    made.see(made.by_name["t"], info("t", kv_tokens=0))
    made.review(0.0)
    assert made.kv_tokens == 0
    assert (instances("e").kv_tokens, instances("e").kv_block_tokens) == (0, 0)


def test_the_parts_of_the_model_are_those_that_usable_instances_run() -> None:
    made = instances("e", "t")
    identity = ENCODER.identity
    made.see(made.by_name["t"], replace(info("t"), parts=(ServedPart(replace(identity, hardware="other"), 4),)))
    made.see(made.by_name["e"], replace(info("e"), parts=(ServedPart(identity, 4),)))
    made.by_name["t"].draining = True
    made.review(0.0)
    assert made.parts == {ModelPart.ENCODER: identity}


def test_predictions_of_all_instances_change_with_what_was_learned() -> None:
    backlogs = Backlogs(lambda _: None, RelativeTimes(), RelativeTimes())
    made = Instances(2, backlogs)
    made.join(Member("e"))
    made.see(made.by_name["e"], info("e"))
    made.review(0.0)
    assert made.pool(ENCODE, 0.0).backlog == [None]
    for _ in range(8):
        backlogs.encode_times.took("e", 100, 0.1)
        backlogs.observed()
    assert made.pool(ENCODE, 0.0).backlog != [None]
    made.validate()


def test_one_that_leaves_gets_nothing_new() -> None:
    made = instances("e", "h")
    made.leave(made.by_name["e"])
    made.review(0.0)
    assert usable(made) == (["h"], ["h"])
    assert (made.drains("e"), made.drains("h"), made.drains("nobody")) == (True, False, True)


def test_the_host_of_an_instance_is_that_of_its_first_offer() -> None:
    made = instances("e", "t")
    offers = (TransportOffer("shm", "north", b""), TransportOffer("tcp", "south", b""))
    made.see(made.by_name["e"], replace(info("e"), offers=offers))
    made.review(0.0)
    assert made.hosts == made.pool(TEXT, 0.0).hosts == {"i-e": "north"}


def test_stages_without_a_usable_instance_are_missing() -> None:
    def missing(*names: str, reachable: bool = True) -> tuple[str, ...]:
        made = Instances(max_hints=2)
        for name in names:
            made.join(Member(name))
            made.see(made.by_name[name], replace(info(name), continues=True))
            made.by_name[name].reachable = reachable
        made.review(0.0)
        return made.readiness().missing

    assert missing("e", "p", "d") == missing("h") == missing("e", "t") == ()
    assert missing() == missing("h", reachable=False) == ("encode", "prefill", "decode")
    assert missing("e", "p") == ("decode",)
    assert missing("e", "d") == ("prefill",)
