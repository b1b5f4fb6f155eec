"""The text instance's gauges, read at every scrape: queue, batch, KV memory, embeddings, pulls, connections, open stages."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from triptych.domain.kv_segment import KvCopies
from triptych.domain.stage import Stage
from triptych.machine.stage_states import StageStates
from triptych.ports import Clock
from triptych.runtime.metrics import Metrics, gauge, longest_wait, total
from triptych.transport.arena_gauges import ARENA, arena_gauges

from .build import Instance
from .service import LoadedText


def watch(metrics: Metrics, instance: Instance, loaded: LoadedText, clock: Clock) -> None:
    """Read the text part of an instance, and which stages are open, at every scrape."""
    service, receiver, engine = instance.text, instance.receiver, loaded.engine
    preferred = receiver.transports.preferred
    first_pass_tokens = engine.prefix_queries_tokens
    of_model = ("model_name",)

    def per_model(value: float) -> dict[tuple[str, ...], float]:
        return {(engine.model.model_id,): value}

    def of_arena(value: float) -> dict[tuple[str, ...], float]:
        return {("text",): value}

    def of_engine(*, running: int, waiting: int) -> Iterable[Metric]:
        yield gauge("vllm:num_requests_running", "Requests in the engine", per_model(running), of_model)
        text, used = "Requests that wait for items or the engine", 1 - engine.kv_free_tokens / engine.kv_tokens
        yield gauge("vllm:num_requests_waiting", text, per_model(waiting), of_model)
        yield gauge("vllm:kv_cache_usage_perc", "KV memory in use, from 0 to 1", per_model(used), of_model)
        queries, hits = engine.prefix_queries_tokens - first_pass_tokens, per_model(engine.prefix_hits_tokens)
        yield total(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", per_model(queries), of_model
        )
        yield total("vllm:prefix_cache_hits", "... and found there", hits, of_model)
        yield total("vllm:num_preemptions", "Sequences preempted", per_model(engine.preemptions), of_model)
        yield from _of_copies(engine.kv_copies)

    def read() -> Iterable[Metric]:
        load, memory, pulls = service.load(), receiver.cache, receiver.cache.pulls
        prefill, decode = load.at(Stage.PREFILL), load.at(Stage.DECODE)
        if loaded.metrics is None:
            yield from of_engine(running=decode.pending, waiting=prefill.pending)
        yield longest_wait(
            "triptych_longest_wait_seconds", "Longest wait of the requests that are waiting", service.longest_waits_s()
        )
        yield gauge(
            "triptych_text_tokens_pending",
            "Tokens to prefill or decode",
            prefill.pending_tokens + decode.pending_tokens,
        )
        yield gauge(
            "triptych_arena_capacity_bytes",
            "Registered memory for pulled embeddings",
            of_arena(memory.capacity_bytes),
            ARENA,
        )
        yield gauge(
            "triptych_arena_leased_bytes",
            "... that is in use, being written, or in quarantine",
            of_arena(memory.pinned_bytes),
            ARENA,
        )
        yield gauge(
            "triptych_arena_cached_bytes",
            "... that holds cached embeddings not in use",
            of_arena(memory.cached_bytes),
            ARENA,
        )
        yield gauge("triptych_arena_embeddings", "Embeddings in it", of_arena(memory.cached), ARENA)
        if instance.store is not None:
            yield from arena_gauges(instance.store.memory, "kv", "keys and values")
        yield gauge("triptych_requests_waiting_for_memory", "Requests waiting for room in it", memory.waiting)
        yield gauge("triptych_pulls_waiting", "Pulls waiting", pulls.waiting)
        yield gauge("triptych_pulls_running", "Pulls running", pulls.under_way)
        yield gauge("triptych_pulls_running_bytes", "Their bytes", pulls.nbytes_under_way)
        yield gauge("triptych_connections", "Connections to holders' memory", receiver.peers.by_backend(), ("backend",))
        chosen: dict[tuple[str, ...], float] = {(preferred,): 1.0} if preferred else {}
        yield gauge("triptych_transport_preferred", "The backend that the settings prefer", chosen, ("backend",))

    metrics.watch(read)
    if loaded.metrics is not None:
        metrics.watch(loaded.metrics)
    if instance.switching is not None:
        watch_stages(metrics, instance.switching.states, clock)


def watch_stages(metrics: Metrics, states: StageStates, clock: Clock) -> None:
    """Read the stages of an instance that switches at every scrape."""

    def read() -> Iterable[Metric]:
        found: dict[tuple[str, ...], float] = {
            (stage.value,): float(stage in states.open) for stage in Stage if stage in states.widest.stages
        }
        yield gauge("triptych_stage_open", "1 if the instance takes work of this stage", found, ("stage",))
        text = "Since the last order to switch; 0 once it is carried out"
        yield gauge("triptych_switch_pending_seconds", text, states.pending_s(clock()))

    metrics.watch(read)


def _of_copies(copies: KvCopies) -> Iterable[Metric]:
    counts: dict[tuple[str, ...], float] = {("out",): copies.out, ("back",): copies.back}
    yield total("triptych_kv_copies", "Preempted sequences copied to host memory, and back", counts, ("direction",))
    nbytes: dict[tuple[str, ...], float] = {("out",): copies.out_bytes, ("back",): copies.back_bytes}
    yield total("triptych_kv_copied_bytes", "Bytes of these copies", nbytes, ("direction",))
    text = "Tokens of preempted sequences that were copied back instead of recomputed"
    yield total("triptych_kv_restored_tokens", text, copies.back_tokens)
    yield gauge("triptych_kv_copies_capacity_bytes", "Host memory for these copies", copies.capacity_bytes)
    yield gauge("triptych_kv_copies_held_bytes", "... that is in use", copies.held_bytes)
