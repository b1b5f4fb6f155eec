"""The places that requests get at text instances: for their prompts, and where their answers go on."""

from collections import Counter
from dataclasses import replace

from triptych.domain.generation import Finished, FinishReason
from triptych.domain.instance import StageLoad
from triptych.domain.rng import Rng
from triptych.domain.stage import Stage
from triptych.errors import ModelNotFound, Overloaded, TriptychError, Unavailable
from triptych.machine.router.backlogs import CostsOf
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.machine.router.credit_ledger import Credit, CreditLedger
from triptych.machine.router.expected_output import ExpectedOutput
from triptych.machine.router.instance import Instance
from triptych.machine.router.instances import TEXT, Instances
from triptych.machine.router.known_prefixes import KnownPrefixes
from triptych.machine.router.lenders import Lenders, LendingCounts
from triptych.machine.router.shared_events import Grant, Granted, Moved, PlaceRefused, TextWanted
from triptych.machine.router.waiting_requests import WaitingRequests
from triptych.policy.lending import LenderState
from triptych.policy.placement.requests import (
    RequestPlace,
    RequestShortage,
    is_faster_elsewhere,
    is_kept_apart,
    place_at_lender,
    place_request,
)
from triptych.policy.placement.wants import RequestWant
from triptych.policy.policies import Policies

MOST_TOGETHER = 4
"""Suspects at one instance at a time, of which each has had a token. What ends an engine mostly does so before its first one."""
_NOBODY: frozenset[str] = frozenset()


class TextPlaces:
    """Owner of which prompts wait for KV memory, and of where prompts and answers go.

    Part of ``machine.router.cluster.ClusterMachine``, which alone changes it.

    A prompt whose answer will be transferred goes to an instance only when those that decode have KV memory for it. So
    nothing is computed that nobody can take. Until then it waits here, and what holds it up holds up those behind it.
    """

    def __init__(
        self,
        instances: Instances,
        credits_: CreditLedger,
        policies: Policies,
        rng: Rng,
        *,
        limits: ClusterLimits,
        retry_after_s: float,
        costs: CostsOf,
    ) -> None:
        self._instances = instances
        self._credits = credits_
        self._policies = policies
        self._rng = rng
        self._limits = limits
        self._retry_after_s = retry_after_s
        self.expected = ExpectedOutput()
        """For reading."""
        self._model_id = ""
        """The model that the instances serve."""
        self.waiting: WaitingRequests[TextWanted] = WaitingRequests()
        """For KV memory; for reading."""
        self.lenders = Lenders(instances, policies.lending, limits)
        """For reading; nothing is noted there if no policy lends."""
        self._prefixes = KnownPrefixes(instances, policies.prefixes, costs)

    # --- events ------------------------------------------------------------------------------------------------------

    def review(self) -> None:
        """The instances have changed."""
        model = self._instances.model
        if model is not None and model.model_id != self._model_id:
            self._model_id = model.model_id
            self.expected.forget()
        self.lenders.review()
        self._prefixes.review()

    def wanted(self, event: TextWanted, now_s: float, *, lost: bool) -> list[Granted | PlaceRefused]:
        """``lost``: no instance has been usable for the whole grace period."""
        if self.lenders.states:
            self.lenders.update(now_s, len(self.waiting.in_order))
        before = self.waiting.in_order
        first_in_line = not before or all(self._is_kept_apart(waiting.wanted, now_s) for waiting in before)
        placed = self._place(event, now_s, first_in_line=first_in_line)
        if isinstance(placed, Grant):
            return [Granted(event.request, (placed,))]
        if event.early:
            return []
        if placed is RequestShortage.NO_LORA:
            return [PlaceRefused(event.request, no_lora(), final=True)]
        if placed is RequestShortage.NO_INSTANCE:
            # Usable ones that were not chosen are of the release before, and cannot go on with answers.
            final = lost or (event.continues and self._instances.has_text)
            return [PlaceRefused(event.request, self.no_text(), final)]
        if len(self.waiting.in_order) >= self._limits.max_waiting_requests:
            error = Overloaded("too many requests wait for KV memory", retry_after_s=self._retry_after_s)
            return [PlaceRefused(event.request, error)]
        self.waiting.add(event, now_s)
        return []

    def serve_waiting(self, now_s: float, *, lost: bool) -> list[Granted | PlaceRefused]:
        """In their order, as long as there is KV memory."""
        self.waiting.put_lost_back(now_s)
        self.lenders.update(now_s, len(self.waiting.in_order))
        effects: list[Granted | PlaceRefused] = []
        for waiting in self.waiting.in_order.copy():
            wanted = waiting.wanted
            placed = self._place(wanted, now_s, first_in_line=True)
            if placed is RequestShortage.TO_COME:
                if self._is_kept_apart(wanted, now_s):
                    continue
                break
            self.waiting.remove(wanted.request)
            if isinstance(placed, Grant):
                effects.append(Granted(wanted.request, (placed,)))
            elif placed is RequestShortage.NO_LORA:
                effects.append(PlaceRefused(wanted.request, no_lora(), final=True))
            else:
                effects.append(PlaceRefused(wanted.request, self.no_text(), lost))
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
        for effect in effects:
            lenders.gone(effect.credit)
        return effects

    def _lend(self, wanted: TextWanted, name: str, now_s: float) -> Grant | None:
        """A place for it at a lender; None if that has no memory for it, or would not be done with it earlier."""
        want, prompts = self._want(wanted), self._instances.texts(now_s)
        chosen = place_at_lender(prompts, want, name, self._policies.text_routing, self._rng)
        if chosen is None:
            return None
        prompts.turn += 1
        return self._credits.grant(
            self._credit(wanted, want, chosen, TEXT[0], wanted.tokens), None, now_s, suspect=wanted.suspect
        )

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
        grant = Grant(
            number, None, instance.name, info.instance_id, "its place was kept there", transfers_kv=credit.transfers_kv
        )
        return grant if event.kept_tokens else self._with_prefix(grant, event)

    def _why_not_kept(self, instance: Instance, event: TextWanted, now_s: float) -> str:
        """As in ``LendingCounts.taken_back``; empty if it is."""
        if not instance.usable or not instance.serves(TEXT) or not instance.has_lora(event.lora):
            return "lost"
        self.lenders.update(now_s, len(self.waiting.in_order))
        if self.lenders.states.get(instance.name) is LenderState.ENCODE_ONLY:
            return "closed"
        prompts = self._instances.texts(now_s)
        slower = is_faster_elsewhere(prompts, instance.name, event.tokens, event.kept_tokens, event.lora)
        return "slower" if slower else ""

    def _place(self, event: TextWanted, now_s: float, *, first_in_line: bool) -> Grant | RequestShortage:
        """``first_in_line``: no other prompt waits for KV memory before it."""
        instances, policies = self._instances, self._policies
        if event.lora and event.lora not in instances.lora_digests:
            return RequestShortage.NO_LORA
        want, prompts = self._want(event, first_in_line=first_in_line), instances.texts(now_s)
        place = place_request(prompts, want, policies.text_routing, policies.kv_transfer, self._rng)
        if not isinstance(place, RequestPlace):
            return place
        stage, tokens = TEXT[0], event.tokens
        if event.continues:
            prompts.answers.turn += 1
            if want.sender:
                stage, tokens = Stage.DECODE, want.tokens
            if self.lenders.states:
                self.lenders.lent(place.name, "continued")
        else:
            prompts.turn += 1
        if instances.backlogs is not None and not want.sender:
            instances.backlogs.prompted(event.tokens)
        credit = self._credit(event, want, place.name, stage, tokens)
        credit.early, credit.transfers_kv = event.early, place.transfers_kv
        if place.transfers_kv:
            credit.output_tokens = 0
        grant = self._credits.grant(credit, None, now_s, suspect=event.suspect)
        if policies.lending is not None and not event.early and not event.continues:
            self.lenders.placed(grant.credit, event, place.name)
            self.lenders.lent(place.name, "new")
        grant = self._with_prefix(grant, event)
        return replace(grant, transfers_kv=True) if place.transfers_kv else grant

    def _with_prefix(self, grant: Grant, event: TextWanted) -> Grant:
        prefix = None if event.prompt is None else self._prefixes.of(event.prompt, grant.name)
        return replace(grant, prefix=prefix) if prefix else grant

    def _want(self, event: TextWanted, *, first_in_line: bool = True) -> RequestWant:
        """What the request wants, with what is expected of its answer."""
        answer_tokens = self.expected.predict(event.with_items, event.max_tokens)
        kv_tokens, most = event.tokens + event.choices * answer_tokens, self._instances.kv_tokens
        sender = self._instances.by_name.get(event.sender) if event.continues else None
        return RequestWant(
            max(0, event.tokens - event.covered_tokens),
            answer_tokens,
            event.choices,
            min(kv_tokens, most) if most else kv_tokens,  # as far as an instance can hold it
            event.avoid,
            self._with_suspects(event) if event.suspect else _NOBODY,
            event.holders,
            event.continues,
            event.early,
            first_in_line,
            self._credits.promised_kv_tokens,
            "" if sender is None else sender.name,
            "" if sender is None or sender.info is None else sender.info.kv_kind,
            event.moves,
            event.lora,
        )

    def _credit(self, event: TextWanted, want: RequestWant, name: str, stage: Stage, tokens: int) -> Credit:
        return Credit(
            event.request,
            name,
            stage,
            None,
            tokens,
            0,
            event.with_items,
            want.all_answer_tokens,
            kv_tokens=want.kv_tokens,
            continues=event.continues,
        )

    def _is_kept_apart(self, event: TextWanted, now_s: float) -> bool:
        """Whether it waits for other suspects, for which nobody else waits, and not for KV memory."""
        return event.suspect and is_kept_apart(self._instances.texts(now_s), self._want(event))

    def _with_suspects(self, event: TextWanted) -> frozenset[str]:
        """Instances that may end with another request: a few that have had a token each share one."""
        suspects = [credit for credit in self._credits.suspects.values() if credit.request != event.request]
        apart = {credit.name for credit in suspects if not (event.continues and credit.continues)}
        shared = Counter([credit.name for credit in suspects if credit.name not in apart])
        return frozenset(apart.union([name for name, count in shared.items() if count >= MOST_TOGETHER]))

    def no_text(self) -> TriptychError:
        return Unavailable("no text instance is available", retry_after_s=self._retry_after_s)

    # --- readers -----------------------------------------------------------------------------------------------------

    @property
    def lending(self) -> LendingCounts:
        lenders = self.lenders.states
        there = (credit for credit in self._credits.by_number.values() if credit.name in lenders)
        return self.lenders.counts(sum(credit.stage is not Stage.ENCODE for credit in there))

    def answer_ended(self, credit: Credit, finished: Finished) -> None:
        """A choice of this credit's request is over."""
        if credit.content is None:
            by_itself = finished.reason is not FinishReason.LENGTH
            self.expected.observe(credit.with_items, finished.completion_tokens, by_itself=by_itself)

    def expected_tokens(self, decode: StageLoad, prefill: StageLoad) -> int | None:
        """The tokens that are expected to be decoded at an instance, while its report has the most that may be; None without any.

        Its answers may be other routers', so their class is not known.
        """
        answers = decode.pending + prefill.pending
        if not answers or not decode.pending_tokens:
            return None
        return answers * self.expected.predict(None, decode.pending_tokens // answers)


def no_lora() -> TriptychError:
    return ModelNotFound("the LoRA adapter of the request is not served any more", param="model")
