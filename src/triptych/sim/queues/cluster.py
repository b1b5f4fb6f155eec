"""The instances of a deployment as queues, with their router."""

from collections.abc import Callable, Mapping
from random import Random

from triptych.domain.scaling import Kind
from triptych.domain.stage import ModelPart, Stage
from triptych.engine.delay import kv_memory
from triptych.policy.costs import Costs
from triptych.policy.placement.pool import Pool
from triptych.services.text.device_scheduler import turns_of

from ..agenda import Agenda  # noqa: TID252 - of the simulator
from ..engines import Activity  # noqa: TID252
from ..prepare import Prompts  # noqa: TID252
from ..scenario import Deployment  # noqa: TID252
from .encoder import QueueEncoder
from .expectations import Expectations
from .instance import Instance
from .request import Request
from .router import QueueRouter
from .text import QueueText
from .transfers import Transfers


class QueueCluster:
    """All instances and a router, from time 0 on."""

    def __init__(
        self, deployment: Deployment, seed: int, on_end: Callable[[Request, str, float], None], *, keeps_spans: bool
    ) -> None:
        """``on_end``: as of ``QueueRouter``."""
        self.agenda = Agenda()
        self._deployment = deployment
        self.transfers = Transfers(deployment.topology(), self.agenda, control_s=deployment.control_s)
        costs = {
            pool: {part: Costs(profile) for part, profile in deployment.kinds[pool].profiles.items()}
            for pool in deployment.sizes
        }
        self.instances = {
            name: self._instance(name, pool, costs[pool], Activity(name, keeps_spans=keeps_spans))
            for name, pool in sorted(deployment.instances.items())
        }
        self.router = QueueRouter(
            deployment.router,
            Prompts(deployment.family, deployment.model, deployment.router.shards),
            self.instances,
            (self._encoders(), self._texts()),
            Expectations(
                deployment.router.slo,
                {part: own for of_pool in costs.values() for part, own in of_pool.items()},
                encoders=sum(count for pool, count in deployment.sizes.items() if pool.role.serves(Stage.ENCODE)),
            ),
            self.transfers,
            self.agenda,
            Random(f"{seed}/router"),  # noqa: S311 - nobody is to be kept out
            on_end,
            kv_tokens=max(instance.kv_tokens for instance in self._serving(Stage.DECODE)),
            control_s=deployment.control_s,
        )

    def _instance(self, name: str, pool: Kind, costs: Mapping[ModelPart, Costs], activity: Activity) -> Instance:
        deployment, agenda = self._deployment, self.agenda
        kind = deployment.kinds[pool]
        instance = Instance(name, pool.role, kind, activity)
        if pool.role.serves(Stage.ENCODE):
            instance.encoder = QueueEncoder(
                deployment.encoder,
                costs[ModelPart.ENCODER],
                agenda,
                activity,
                cores=kind.prepare_cores,
                bytes_per_pixel=deployment.bytes_per_pixel,
            )
        if (settings := deployment.texts.get(pool)) is not None:
            kv = kv_memory(deployment.model, costs[ModelPart.DECODER], settings.engine_options)
            budget = deployment.image_budgets.get(pool)
            instance.kv_tokens = kv[0]
            instance.text = QueueText(
                name,
                settings,
                costs[ModelPart.DECODER],
                kv,
                agenda,
                activity,
                self.transfers,
                arena_nbytes=settings.kv_arena_bytes if instance.encoder is None else deployment.encoder.arena_bytes,
                copied_bytes_per_s=kind.copied_bytes_per_s,
                encoder=instance.encoder,
                turns=None if instance.encoder is None else turns_of(settings, budget),
                budget=budget,
            )
        return instance

    # --- pools -------------------------------------------------------------------------------------------------------

    def _serving(self, stage: Stage) -> list[Instance]:
        return [instance for instance in self.instances.values() if instance.role.serves(stage)]

    def _encoders(self) -> Pool:
        settings, encoders = self._deployment.encoder, self._serving(Stage.ENCODE)
        rows = [encoder.encode_row(settings.arena_bytes, settings.batches.max_waiting_items) for encoder in encoders]
        pool = Pool(rows)
        for encoder in encoders:
            encoder.encodes_in(pool)
        return pool

    def _texts(self) -> Pool:
        """Those that prefill, with the pool in which their answers go on: another one, unless both are the same instances."""
        prefill, decode = self._serving(Stage.PREFILL), self._serving(Stage.DECODE)
        pool = self._text_pool(prefill)
        if prefill != decode:
            pool.answers = self._text_pool(decode)
        return pool

    @staticmethod
    def _text_pool(texts: list[Instance]) -> Pool:
        pool = Pool([text.text_row() for text in texts], text_load=lambda place: texts[place].text_load)
        for text in texts:
            text.serves_in(pool)
        return pool
