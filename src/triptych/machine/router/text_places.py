"""The places that requests get at text instances: for their prompts, and where their answers go on."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

from triptych.domain.generation import Finished, FinishReason
from triptych.domain.instance import StageLoad
from triptych.domain.rng import Rng
from triptych.domain.stage import Stage
from triptych.errors import Overloaded, TriptychError, Unavailable
from triptych.machine.router.backlogs import CostsOf
from triptych.machine.router.credit_ledger import Credit, CreditLedger
from triptych.machine.router.expected_output import AnswerClass, ExpectedOutput
from triptych.machine.router.instance import Instance, Stages
from triptych.machine.router.instances import TEXT, Instances
from triptych.machine.router.known_prefixes import KnownPrefixes
from triptych.machine.router.lenders import MOST_MOVES, Lenders, LendingCounts, LendingLimits
from triptych.machine.router.shared_events import Grant, Granted, Moved, Refused, TextWanted
from triptych.machine.router.waiting_requests import WaitingRequests
from triptych.policy.backlog import Work
from triptych.policy.handoff import has_room
from triptych.policy.lending import LenderState, ends_earlier
from triptych.policy.policies import Policies
from triptych.policy.routing import choose_text

MOST_TOGETHER = 4
"""Suspects at one instance at a time, of which each has had a token. What ends an engine mostly does so before its first one."""
_NOBODY: frozenset[str] = frozenset()


def _answer_classes(model_id: str) -> dict[bool | None, AnswerClass]:
    """By whether they are answers to items as well; None if that is not known."""
    return {with_items: AnswerClass(model_id, with_items) for with_items in (None, False, True)}


class TextPlaces:
    """Part of ``machine.router.cluster.ClusterMachine``, which alone changes it.

    A prompt whose answer will be handed over goes to an instance only when those that decode have KV memory for it, so that
    nothing is computed that nobody can take. Until then it waits here, and what holds it up holds up those behind it.
    """

    def __init__(
        self,
        instances: Instances,
        credits_: CreditLedger,
        policies: Policies,
        rng: Rng,
        *,
        max_waiting: int,
        lending: LendingLimits,
        retry_after_s: float,
        costs: CostsOf,
    ) -> None:
        self._instances = instances
        self._credits = credits_
        self._policies = policies
        self._may_hand_over = policies.may_hand_over
        """Whether instances that decode as well may hand over."""
        self._rng = rng
        self._max_waiting = max_waiting
        self._retry_after_s = retry_after_s
        self.expected = ExpectedOutput()
        """For reading."""
        self._answers = _answer_classes("")
        """Of the model that the instances serve."""
        self.waiting: WaitingRequests[TextWanted] = WaitingRequests()
        """For KV memory; for reading."""
        self.lenders = Lenders(instances, policies.lending, lending)
        self._prefixes = KnownPrefixes(instances, policies.prefixes, costs)

    # --- events ------------------------------------------------------------------------------------------------------

    def review(self) -> None:
        """The instances have changed."""
        model = self._instances.model
        if model is not None and model.model_id != self._answers[None].model:
            self._answers = _answer_classes(model.model_id)
        self.lenders.review()
        self._prefixes.review()

    def wanted(self, event: TextWanted, now_s: float, *, lost: bool) -> list[Granted | Refused]:
        """``lost``: no instance has been usable for the whole grace period."""
        self.lenders.update(now_s, len(self.waiting.in_order))
        overtakes = all(self._is_kept_apart(waiting.wanted, now_s) for waiting in self.waiting.in_order)
        placed = self._place(event, now_s, overtakes=overtakes)
        if placed is not None or event.early:
            return [] if placed is None else [Granted(event.request, (placed,))]
        if not self._waits(event):
            # Usable ones that were not chosen are of the release before, and cannot go on with answers.
            final = lost or (event.continues and self._instances.has_text)
            return [Refused(event.request, self.no_text(), final)]
        if len(self.waiting.in_order) >= self._max_waiting:
            error = Overloaded("too many requests wait for KV memory", retry_after_s=self._retry_after_s)
            return [Refused(event.request, error)]
        self.waiting.add(event, now_s)
        return []

    def serve_waiting(self, now_s: float, *, lost: bool) -> list[Granted | Refused]:
        """In their order, as long as there is KV memory."""
        self.waiting.put_lost_back(now_s)
        self.lenders.update(now_s, len(self.waiting.in_order))
        effects: list[Granted | Refused] = []
        for one in self.waiting.in_order.copy():
            placed = self._place(one.wanted, now_s, overtakes=True)
            if placed is None and self._waits(one.wanted):
                if self._is_kept_apart(one.wanted, now_s):
                    continue
                break
            self.waiting.remove(one.wanted.request)
            answer = Refused(one.wanted.request, self.no_text(), lost) if placed is None else None
            effects.append(answer or Granted(one.wanted.request, (placed,) if placed is not None else ()))
        return effects

    def move(self, now_s: float) -> list[Moved]:
        """Requests leave the text instances where they wait, from the last on, as long as a lender would be done with them earlier;
        and lenders that encode instead.
        """
        lenders = self.lenders
        lenders.update(now_s, len(self.waiting.in_order))
        effects: list[Moved] = []
        for credit, wanted in lenders.held_up(now_s):
            effects.append(Moved(wanted.request, credit, None, "items go first where it waits"))
            lenders.taken_back("held_up")
        while (last := lenders.last_waiting() if lenders.lending else None) is not None:
            credit, wanted, name = last
            if (grant := self._lend(wanted, name, now_s)) is None:
                break
            effects.append(Moved(wanted.request, credit, grant, f"it waits at {name}, and an encoder is idle"))
            lenders.lent(grant.name, "moved")
            lenders.gone(credit)
            lenders.update(now_s, len(self.waiting.in_order))
        for one in effects:
            lenders.gone(one.credit)
        return effects

    def _lend(self, wanted: TextWanted, name: str, now_s: float) -> Grant | None:
        """A place for it at a lender; None if that has no memory for it, or would not be done with it earlier."""
        each_tokens = self.expected.predict(self._answers[wanted.with_items], wanted.max_tokens)
        instances, lending = self._instances, self.lenders.lending
        others = frozenset([one for one in instances.pools[TEXT].members if one not in lending])
        chosen = self._choose(wanted, wanted.avoid | others | instances.prefill_only, each_tokens, now_s)
        if chosen is None:
            return None
        seen = {one.name: one for one in instances.pool(TEXT, now_s).candidates if one.name in (name, chosen)}
        work = Work(wanted.tokens, answer_tokens=wanted.choices * each_tokens)
        if name not in seen or seen[chosen].backoff or not ends_earlier(seen[name], seen[chosen], work):
            return None
        instances.turns[TEXT] += 1
        return self._credits.grant(self._credit(wanted, chosen, TEXT[0], wanted.tokens, each_tokens), None, now_s)

    # --- places ------------------------------------------------------------------------------------------------------

    def kept(self, number: int, event: TextWanted, now_s: float) -> Grant | None:
        """The credit granted for beginnings of a prompt, or when it was moved, for the whole request; None if its instance is not usable
        or has to encode, or another would have computed the whole prompt before that one has computed the rest.
        """
        credit = self._credits.by_number.get(number)
        if credit is None:
            return None
        instance = self._instances.by_name[credit.name]
        info, why = instance.info, self._why_not_kept(instance, event, now_s)
        if info is None or why:
            if instance.name in self.lenders.states:
                self.lenders.taken_back(why)
            return None
        self.lenders.placed(number, event, instance.name)
        grant = Grant(number, None, instance.name, info.instance_id, "its place was kept there")
        return grant if event.kept_tokens else self._with_prefix(grant, event)

    def _why_not_kept(self, instance: Instance, event: TextWanted, now_s: float) -> str:
        """As in ``LendingCounts.taken_back``; empty if it is."""
        if not instance.usable or not instance.serves(TEXT):
            return "lost"
        self.lenders.update(now_s, len(self.waiting.in_order))
        states, closed = self.lenders.states, self.lenders.closed
        if states.get(instance.name) is LenderState.ENCODE_ONLY:
            return "closed"
        texts = [self._instances.by_name[name] for name in self._instances.pools[TEXT].members]
        others = [
            one.pending_tokens(TEXT[0])
            for one in texts
            if one.usable and one is not instance and one.name not in closed
        ]
        slower = others and min(others) + event.tokens < instance.pending_tokens(TEXT[0]) - event.kept_tokens
        return "slower" if slower else ""

    def _place(self, event: TextWanted, now_s: float, *, overtakes: bool) -> Grant | None:
        """``overtakes``: no other prompt waits for KV memory before it."""
        each_tokens = self.expected.predict(self._answers[event.with_items], event.max_tokens)
        if event.continues:
            return self._go_on(event, each_tokens, now_s)
        unable = self._instances.without_early_prefill.union(self.lenders.states) if event.early else _NOBODY
        chosen = self._choose(event, event.avoid | unable if unable else event.avoid, each_tokens, now_s)
        if chosen is None:
            return None
        prefill_only, hands_over = self._instances.prefill_only, False
        if prefill_only or self._may_hand_over:
            kv_tokens = self._kv_tokens(event, each_tokens)
            if chosen in prefill_only and not (overtakes and self._has_room(chosen, kv_tokens)):
                chosen = self._choose(event, event.avoid | unable | prefill_only, each_tokens, now_s)
                if chosen is None:
                    return None
            by_policy = overtakes and not event.early and self._may_hand_over
            hands_over = chosen in prefill_only or (by_policy and self._hands_over(chosen, each_tokens, kv_tokens))
        self._instances.turns[TEXT] += 1
        if self._instances.backlogs is not None:
            self._instances.backlogs.prompted(event.tokens)
        place = self._credit(event, chosen, TEXT[0], event.tokens, each_tokens)
        place.early, place.hands_over = event.early, hands_over
        if hands_over:
            place.output_tokens = 0
        grant = self._credits.grant(place, None, now_s)
        if not event.early:
            self.lenders.placed(grant.credit, event, chosen)
            self.lenders.lent(chosen, "new")
        grant = self._with_prefix(grant, event)
        return replace(grant, hands_over=True) if hands_over else grant

    def _with_prefix(self, grant: Grant, event: TextWanted) -> Grant:
        prefix = self._prefixes.of(event.prompt, grant.name)
        return replace(grant, prefix=prefix) if prefix else grant

    def _waits(self, event: TextWanted) -> bool:
        """Whether it was not placed for want of KV memory alone, or because it may end its instance, as others may that run."""
        texts = self._instances.pools[TEXT].members | self._instances.pools[self._instances.answering].members
        if event.suspect and any(name in texts and texts[name].usable for name in self._with_suspects(event)):
            return True
        if event.continues:
            return False
        prefill_only = self._instances.prefill_only - event.avoid
        return any(self._instances.by_name[name].usable for name in prefill_only)

    def _hands_over(self, name: str, each_tokens: int, kv_tokens: int) -> bool:
        """Whether this one, which decodes as well, does by the policy."""
        instance = self._instances.by_name[name]
        receivers = self._receivers(instance, alike=True)
        if instance.info is None or not instance.info.hands_over or not receivers:
            return False
        return self._policies.handoff(
            expected_tokens=each_tokens,
            here_tokens=instance.pending_tokens(Stage.DECODE),
            there_tokens=min([one.pending_tokens(Stage.DECODE) for one in receivers]),
        ) and self._has_room(name, kv_tokens)

    def _has_room(self, sender: str, kv_tokens: int) -> bool:
        """Whether those that would take an answer from there have KV memory for it."""
        receivers = self._receivers(self._instances.by_name[sender])
        return has_room([one.kv_room for one in receivers], kv_tokens, self._credits.promised_kv_tokens)

    def _receivers(self, sender: Instance, *, alike: bool = False) -> list[Instance]:
        """Lenders that are closed only if there is no other."""
        able, closed = self._instances.receivers(sender, alike=alike), self.lenders.closed
        return [one for one in able if one.name not in closed] or able

    def _kv_tokens(self, event: TextWanted, each_tokens: int) -> int:
        """What the answer takes of KV memory, as far as an instance can hold it."""
        expected = event.tokens + event.choices * each_tokens
        most = self._instances.kv_tokens
        return min(expected, most) if most else expected

    def _go_on(self, event: TextWanted, each_tokens: int, now_s: float) -> Grant | None:
        """With an answer: where its keys and values can be used, and there is room for them."""
        instances = self._instances
        unable, sender = instances.without_continuations, instances.by_name.get(event.sender)
        receivers = [] if sender is None else self._receivers(sender)
        kv_tokens = self._kv_tokens(event, each_tokens)
        chosen = None
        for others in self._others(receivers, kv_tokens):
            chosen = self._choose(event, event.avoid | unable | others, each_tokens, now_s)
            if chosen is not None:
                break
        if chosen is None:
            chosen = self._choose(event, unable, each_tokens, now_s)
        if chosen is None:
            return None
        instances.turns[instances.answering] += 1
        stage, tokens = TEXT[0], event.tokens
        if sender is not None:
            stage, tokens = Stage.DECODE, max(0, event.tokens - event.covered_tokens)
        elif instances.backlogs is not None:
            instances.backlogs.prompted(event.tokens)
        self.lenders.lent(chosen, "continued")
        grant = self._credits.grant(self._credit(event, chosen, stage, tokens, each_tokens), None, now_s)
        return self._with_prefix(grant, event)

    def _others(self, receivers: Collection[Instance], kv_tokens: int) -> Iterator[frozenset[str]]:
        """Whom to leave out, from the most selective on."""
        if receivers:
            members = self._instances.pools[self._instances.answering].members
            roomy = [one for one in receivers if one.kv_room >= kv_tokens]
            for liked in (roomy, receivers):
                if len(liked) < len(members):
                    names = {one.name for one in liked}
                    yield frozenset([name for name in members if name not in names])
        yield _NOBODY

    def _credit(self, event: TextWanted, name: str, stage: Stage, tokens: int, each_tokens: int) -> Credit:
        output_tokens = event.choices * each_tokens
        return Credit(
            event.request,
            name,
            stage,
            None,
            tokens,
            0,
            self._answers[event.with_items],
            output_tokens,
            kv_tokens=self._kv_tokens(event, each_tokens),
            suspect=event.suspect,
            continues=event.continues,
        )

    def _choose(self, event: TextWanted, avoid: frozenset[str], answer_tokens: int, now_s: float) -> str | None:
        instances = self._instances
        stages = instances.answering if event.continues else TEXT
        if self.lenders.states:
            avoid |= self._without_lenders(event, stages, self._kv_tokens(event, answer_tokens))
        if event.suspect:
            avoid |= self._with_suspects(event)
            if avoid.issuperset(instances.pools[stages].members):
                return None  # mostly, and it is one of many
        return choose_text(
            instances.pool(stages, now_s),
            self._policies.text_routing,
            self._rng,
            avoid=avoid,
            holders=event.holders,
            hosts=instances.hosts,
            tokens=max(0, event.tokens - event.covered_tokens),
            answer_tokens=answer_tokens,
        )

    def _is_kept_apart(self, event: TextWanted, now_s: float) -> bool:
        """Whether it waits for other suspects, for which nobody else waits, and not for KV memory."""
        return event.suspect and (event.continues or self._choose(event, event.avoid, 0, now_s) is None)

    def _with_suspects(self, event: TextWanted) -> frozenset[str]:
        """Those that may end with another request: a few that have had a token each share one."""
        suspects = [credit for credit in self._credits.suspects.values() if credit.request != event.request]
        apart = {credit.name for credit in suspects if not (event.continues and credit.continues)}
        shared = Counter([credit.name for credit in suspects if credit.name not in apart])
        return frozenset(apart.union([name for name, count in shared.items() if count >= MOST_TOGETHER]))

    def _without_lenders(self, event: TextWanted, stages: Stages, kv_tokens: int) -> frozenset[str]:
        """Those that are closed or have no memory for it; none where there are only lenders to go on with."""
        states, members = self.lenders.states, self._instances.pools[stages].members
        if not any(one.usable and name not in states and name not in event.avoid for name, one in members.items()):
            return _NOBODY
        if event.moves >= MOST_MOVES:
            return frozenset(states)
        narrow = [name for name in self.lenders.lending if self._instances.by_name[name].kv_room < kv_tokens]
        return self.lenders.closed.union(narrow)

    def no_text(self) -> TriptychError:
        return Unavailable("no text instance is available", retry_after_s=self._retry_after_s)

    # --- readers -----------------------------------------------------------------------------------------------------

    @property
    def lending(self) -> LendingCounts:
        lenders = self.lenders.states
        there = (one for one in self._credits.by_number.values() if one.name in lenders)
        return self.lenders.counts(sum(one.stage is not Stage.ENCODE for one in there))

    def answer_ended(self, credit: Credit, finished: Finished) -> None:
        """A choice of this credit's request is over."""
        if credit.answers is not None:
            by_itself = finished.reason is not FinishReason.LENGTH
            self.expected.observe(credit.answers, finished.completion_tokens, by_itself=by_itself)

    def expected_tokens(self, decode: StageLoad, prefill: StageLoad) -> int | None:
        """The tokens that are expected to be decoded at an instance, while its report has the most that may be; None without any.

        Its answers may be other routers', so their class is not known.
        """
        answers = decode.pending + prefill.pending
        if not answers or not decode.pending_tokens:
            return None
        return answers * self.expected.predict(self._answers[None], decode.pending_tokens // answers)
