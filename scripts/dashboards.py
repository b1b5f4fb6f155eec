"""Writes the dashboards of ``deploy/grafana/dashboards``: ``python -m scripts.dashboards``; with ``--check`` it compares them.

They are described here with Grafana's typed builders, whose types are those of its schema.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    tempo,
    timeseries,
)
from grafana_foundation_sdk.builders import text as markdown
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_types
from grafana_foundation_sdk.models import dashboard as schema
from grafana_foundation_sdk.models import heatmap as heatmap_types
from grafana_foundation_sdk.models import prometheus as prometheus_types

from scripts.generated import run

FOLDER = Path(__file__).parents[1] / "deploy" / "grafana" / "dashboards"
_TAG = "triptych"
_MODEL = 'model_name=~"$model"'
_REQUESTS = f'job="router", {_MODEL}'
"""vLLM as the engine of text instances has metrics of the same names, which begin when a request reaches its engine."""
_TTFT = f'{_MODEL}, metric="ttft"'
_FAILED = 'outcome="failed"'
_API = 'route=~"/v1/.*"'
_LEADER = "and on (job, instance) triptych_pool_manager_leads == 1"

Panel = Builder[schema.Panel]


def rate(metric: str, labels: str = "") -> str:
    return f"rate({metric}{f'{{{labels}}}' if labels else ''}[$__rate_interval])"


def per_s(metric: str, labels: str = "", by: str = "") -> str:
    """The rate of a counter, summed up, or by some labels."""
    return f"sum{f' by ({by}) ' if by else ''}({rate(metric, labels)})"


def quantile(share: float, metric: str, labels: str = "", by: str = "le") -> str:
    return f"histogram_quantile({share}, sum by ({by}) ({rate(metric + '_bucket', labels)}))"


def mean(metric: str, by: str, labels: str = "") -> str:
    return f"sum by ({by}) ({rate(metric + '_sum', labels)}) / sum by ({by}) ({rate(metric + '_count', labels)})"


def share(part: str, whole: str) -> str:
    return f"sum({part}) / sum({whole})"


def _p95_of_hour(metric: str) -> str:
    """Of what is rare, and may not have happened: then 0."""
    return f"histogram_quantile(0.95, sum by (le) (increase({metric}_bucket[1h]))) >= 0 or vector(0)"


def quantiles(metric: str, labels: str = "") -> dict[str, str]:
    return {"P50": quantile(0.5, metric, labels), "P99": quantile(0.99, metric, labels)}


# --- panels ---------------------------------------------------------------------------------------------------------------


def _source() -> schema.DataSourceRef:
    return schema.DataSourceRef(type_val="prometheus", uid="${datasource}")


def _queries(series: dict[str, str]) -> Iterator[prometheus.Dataquery]:
    for number, (legend, expression) in enumerate(series.items()):
        yield (
            prometheus.Dataquery()
            .ref_id(chr(ord("A") + number))
            .datasource(_source())
            .expr(expression)
            .legend_format(legend)
        )


def graph(
    title: str, about: str, unit: str, series: dict[str, str], *, stacked: bool = False, whole: bool = False
) -> Panel:
    """A panel of lines. ``series`` are expressions by legend; ``whole`` is for shares, from 0 to 1."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .datasource(_source())
        .unit(unit)
        .min(0)
        .span(8)
        .height(8)
        .fill_opacity(30 if stacked else 0)
        .show_points(common_types.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_types.LegendDisplayMode.LIST)
            .placement(common_types.LegendPlacement.BOTTOM)
            .calcs([])
        )
        .tooltip(common.VizTooltipOptions().mode(common_types.TooltipDisplayMode.MULTI))
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_types.StackingMode.NORMAL))
    if whole:
        panel = panel.max(1)
    for query in _queries(series):
        panel = panel.with_target(query)
    return panel


def number(title: str, about: str, unit: str, expression: str) -> Panel:
    (query,) = _queries({"": expression})
    return (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(_source())
        .unit(unit)
        .span(4)
        .height(4)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(query)
    )


def states(title: str, about: str, legend: str, expression: str) -> Panel:
    (query,) = _queries({legend: expression})
    return (
        statetimeline.Panel()
        .title(title)
        .description(about)
        .datasource(_source())
        .span(24)
        .height(6)
        .with_target(query)
    )


def buckets(title: str, about: str, metric: str, labels: str = "") -> Panel:
    """A heatmap of a histogram in seconds."""
    (query,) = _queries({"{{le}}": f"sum by (le) ({rate(metric + '_bucket', labels)})"})
    return (
        heatmap.Panel()
        .title(title)
        .description(about)
        .datasource(_source())
        .span(12)
        .height(8)
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit("s"))
        .rows_frame(heatmap.RowsHeatmapOptions().layout(common_types.HeatmapCellLayout.AUTO))
        .color(heatmap.HeatmapColorOptions().mode(heatmap_types.HeatmapColorMode.SCHEME).scheme("Blues"))
        .with_target(query.format(prometheus_types.PromQueryFormat.HEATMAP))
    )


def board(uid: str, title: str, about: str) -> dashboard.Dashboard:
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags([_TAG])
        .readonly()
        .tooltip(schema.DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .link(
            dashboard.DashboardLink("Triptych")
            .type(schema.DashboardLinkType.DASHBOARDS)
            .tags([_TAG])
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("model")
            .label("Model")
            .datasource(_source())
            .query("label_values(vllm:num_requests_running, model_name)")
            .refresh(schema.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )


def laid_out(made: dashboard.Dashboard, rows: dict[str, list[Panel]]) -> schema.Dashboard:
    for title, panels in rows.items():
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(panel)
    built = made.build()
    for id_, panel_or_row in enumerate(_all(built.panels or []), 1):
        panel_or_row.id_val = id_
    return built


def _all(panels: Sequence[schema.Panel | schema.RowPanel]) -> Iterator[schema.Panel | schema.RowPanel]:
    for panel in panels:
        yield panel
        if isinstance(panel, schema.RowPanel):
            yield from panel.panels


# --- dashboards -----------------------------------------------------------------------------------------------------------


def overview() -> schema.Dashboard:
    judged = "triptych_slo_judged_total"
    return laid_out(
        board("triptych-overview", "Triptych: overview", "Whether requests are answered, and how fast."),
        {
            "Now": [
                number("Requests", "Ended per second.", "reqps", per_s("vllm:request_success_total", _REQUESTS)),
                number(
                    "Failed",
                    "Share of the accepted requests that end with an error.",
                    "percentunit",
                    f"({per_s('triptych_requests_total', _FAILED)} or vector(0)) / {per_s('triptych_requests_total')}",
                ),
                number(
                    "Refused",
                    "Per second, by routers.",
                    "reqps",
                    per_s("triptych_requests_refused_total") + " or vector(0)",
                ),
                number(
                    "First token, P99",
                    "From arrival at the router.",
                    "s",
                    quantile(0.99, "vllm:time_to_first_token_seconds", _REQUESTS),
                ),
                number(
                    "TTFT within its objective",
                    "Share of the judged requests.",
                    "percentunit",
                    share(
                        rate(judged, f'{_TTFT}, verdict="met"'),
                        rate(judged, _TTFT),
                    ),
                ),
                number(
                    "Alerts",
                    "That are firing. docs/operations.md says what to do.",
                    "short",
                    'count(ALERTS{alertstate="firing"}) or vector(0)',
                ),
            ],
            "Requests": [
                graph(
                    "Ended",
                    "Accepted requests by how they ended.",
                    "reqps",
                    {"{{outcome}}": per_s("triptych_requests_total", by="outcome")},
                    stacked=True,
                ),
                graph(
                    "Answers of the REST API",
                    "By status.",
                    "reqps",
                    {"{{status}}": per_s("triptych_http_seconds_count", _API, by="status")},
                    stacked=True,
                ),
                graph(
                    "Refused",
                    "Requests that routers did not accept, by code.",
                    "reqps",
                    {"{{code}}": per_s("triptych_requests_refused_total", by="code")},
                    stacked=True,
                ),
                graph(
                    "Time to first token",
                    "From arrival at the router.",
                    "s",
                    quantiles("vllm:time_to_first_token_seconds", _REQUESTS),
                ),
                graph(
                    "Time between tokens",
                    "At text instances.",
                    "s",
                    quantiles("vllm:inter_token_latency_seconds", _MODEL),
                ),
                graph(
                    "Whole request",
                    "From arrival at the router to the last token.",
                    "s",
                    quantiles("vllm:e2e_request_latency_seconds", _REQUESTS),
                ),
                graph(
                    "Tokens",
                    "Prompt tokens include positions of media.",
                    "short",
                    {
                        "prompt": per_s("vllm:prompt_tokens_total", _REQUESTS),
                        "generated": per_s("vllm:generation_tokens_total", _REQUESTS),
                    },
                ),
                graph(
                    "At text instances",
                    "Requests in the engine, and those that wait for items or for the engine.",
                    "short",
                    {
                        "running": f"sum(vllm:num_requests_running{{{_MODEL}}})",
                        "waiting": f"sum(vllm:num_requests_waiting{{{_MODEL}}})",
                    },
                    stacked=True,
                ),
                graph(
                    "Items",
                    "Images, videos and sounds of answered requests.",
                    "short",
                    {"{{modality}}": per_s("triptych_items_total", by="modality")},
                    stacked=True,
                ),
            ],
            "Failures": [
                graph(
                    "Done again",
                    "Work beyond the first attempt: items encoded again or hedged, requests sent to another text instance before or after "
                    "their first token, and those that another router began.",
                    "short",
                    {
                        legend: per_s("triptych_attempts_total", f'kind="{kind}"') + " or vector(0)"
                        for kind, legend in (
                            ("encode_again", "items encoded again"),
                            ("encode_hedge", "items hedged"),
                            ("text_again", "before the first token"),
                            ("continuation", "after the first token"),
                            ("router_continuation", "begun by another router"),
                        )
                    },
                ),
                graph(
                    "In backoff",
                    "Instances that a router avoids, as they fail or are slow, or gives one item or request at a time.",
                    "short",
                    {
                        stage: f'max(sum by (instance) (triptych_instances_in_backoff{{stage="{stage}"}})) or vector(0)'
                        for stage in ("encode", "prefill", "decode")
                    },
                ),
                graph(
                    "Retry budget",
                    "Items that the router with the least of it may have encoded again. At 0 requests fail instead.",
                    "short",
                    {"items": "min(triptych_retry_budget)"},
                ),
            ],
            "Processes": [
                graph(
                    "CPU",
                    "Cores in use, by service.",
                    "short",
                    {"{{job}}": per_s("process_cpu_seconds_total", by="job")},
                ),
                graph(
                    "Memory",
                    "The largest process of each service.",
                    "bytes",
                    {"{{job}}": "max by (job) (process_resident_memory_bytes)"},
                ),
                graph(
                    "Event loop",
                    "Worst delay of the last minutes, by service: whatever blocks the loop delays every request of the process.",
                    "s",
                    {"{{job}}": "max by (job) (triptych_event_loop_lag_max_seconds)"},
                ),
            ],
        },
    )


def pools() -> schema.Dashboard:
    burn = "model_metric:triptych_slo_missed:ratio_rate"
    return laid_out(
        board(
            "triptych-pools",
            "Triptych: pools and objectives",
            "Whether objectives are met, which stage misses them, and what is done about it: sizes, roles, lending.",
        ),
        {
            "Objectives": [
                graph(
                    "Attainment",
                    "Share of the judged requests of the last minute that met the objective.",
                    "percentunit",
                    {"{{metric}} {{modality}}": f"min by (metric, modality) (triptych_slo_attainment{{{_MODEL}}})"},
                    whole=True,
                ),
                graph(
                    "Charged with missed TTFTs",
                    "Share of the requests without a miss that the stage is charged with: prepare (router), encode, prefill.",
                    "percentunit",
                    {"{{stage}} {{modality}}": f"min by (stage, modality) (triptych_slo_stage_attainment{{{_MODEL}}})"},
                    whole=True,
                ),
                graph(
                    "Error budget",
                    "How many times faster than allowed it is used up (1 % of the requests may miss an objective). Alerts fire at 14.4 and 6.",
                    "short",
                    {
                        "{{metric}}, 5 min": f"{burn}5m{{{_MODEL}}} / 0.01",
                        "{{metric}}, 1 h": f"{burn}1h{{{_MODEL}}} / 0.01",
                    },
                ),
                graph(
                    "Latency, P99",
                    "Over the last minute.",
                    "s",
                    {
                        "{{metric}} {{modality}}": f'max by (metric, modality) (triptych_latency_seconds{{{_MODEL}, quantile="0.99"}})'
                    },
                ),
                graph(
                    "Limits",
                    "The objectives in seconds, by class of request; factors follow the latency of a request alone.",
                    "s",
                    {"{{metric}} {{class}}": f"max by (metric, class) (triptych_slo_limit_seconds{{{_MODEL}}})"},
                ),
                graph(
                    "Judged",
                    "Requests per second, by verdict on their TTFT.",
                    "reqps",
                    {"{{verdict}}": per_s("triptych_slo_judged_total", _TTFT, by="verdict")},
                    stacked=True,
                ),
            ],
            "Sizes": [
                graph(
                    "Wanted",
                    "Instances that each pool should have, as the leading manager decided.",
                    "short",
                    {
                        "{{model_name}} {{role}}": f"triptych_pool_wanted_instances{{{_MODEL}}} {_LEADER}",
                    },
                ),
                graph(
                    "Members",
                    "As the managers see them; without a role: routers.",
                    "short",
                    {"{{role}} {{state}}": "max by (role, state) (triptych_pool_members)"},
                ),
                graph(
                    "Usable",
                    "Instances as the routers see them.",
                    "short",
                    {"{{role}} {{state}}": "max by (role, state) (triptych_instances)"},
                ),
                graph(
                    "Attainment of pools",
                    "Share of the requests without a missed TTFT that the pool is charged with.",
                    "percentunit",
                    {"{{model_name}} {{role}}": f"triptych_pool_attainment{{{_MODEL}}} {_LEADER}"},
                    whole=True,
                ),
                graph(
                    "Orders",
                    "To the scaler, within an hour, by what came of them.",
                    "short",
                    {
                        "{{role}} {{kind}} {{outcome}}": f"sum by (role, kind, outcome) (increase(triptych_pool_orders_total{{{_MODEL}}}[1h]))"
                    },
                ),
                graph(
                    "Trouble",
                    "Within an hour: instances that ended before they were ready, and members that fell silent.",
                    "short",
                    {
                        "failed starts {{role}}": f"sum by (role) (increase(triptych_pool_start_failures_total{{{_MODEL}}}[1h]))",
                        "{{outcome}} {{role}}": "max by (role, outcome) (increase(triptych_pool_member_silences_total[1h]))",
                    },
                ),
                states(
                    "States",
                    "What each pool is doing. Frozen: nothing is ordered, docs/operations.md says what to do.",
                    "{{model_name}} {{role}} {{state}}",
                    f"triptych_pool_state{{{_MODEL}}} == 1 {_LEADER}",
                ),
            ],
            "Switching and lending": [
                graph(
                    "Instances that serve a stage",
                    "Whatever role they started with. One with several stages counts at each.",
                    "short",
                    {
                        "{{stage}}": f"sum by (stage) (max by (model_name, stage) (triptych_pool_serving_instances{{{_MODEL}}}))"
                    },
                ),
                graph(
                    "Pressure",
                    "What a stage is going to hold, over what its instances may hold within the objectives. Above 1 it gets instances, if others can spare them. 0 where the manager switches no roles.",
                    "short",
                    {
                        stage: f'max(triptych_pool_stage_pressure{{{_MODEL}, stage="{stage}"}}) or vector(0)'
                        for stage in ("encode", "prefill", "decode")
                    },
                ),
                graph(
                    "Switches",
                    "Orders to switch within an hour, by what came of them, and those that instances refused.",
                    "short",
                    {
                        outcome: f'sum(increase(triptych_pool_switches_total{{{_MODEL}, outcome="{outcome}"}}[1h])) or vector(0)'
                        for outcome in ("obeyed", "overtaken", "given_up", "lost")
                    }
                    | {"refused": 'sum(increase(triptych_switches_total{outcome="refused"}[1h])) or vector(0)'},
                ),
                graph(
                    "Time of a switch",
                    "Longest 5 % within an hour: until the new stages are open, until they have served a request, and until the old ones are closed; and the age of the oldest that is not carried out, or has work and serves none.",
                    "s",
                    {
                        "open": _p95_of_hour("triptych_pool_switch_seconds"),
                        "first request": _p95_of_hour("triptych_pool_switch_first_request_seconds"),
                        "closed": _p95_of_hour("triptych_switch_seconds"),
                        "not obeyed": f"max(triptych_pool_switch_pending_seconds{{{_MODEL}}}) or vector(0)",
                        "not served": f"max(triptych_pool_switch_unserved_seconds{{{_MODEL}}}) or vector(0)",
                        "not closed": "max(triptych_switch_pending_seconds) or vector(0)",
                    },
                ),
                graph(
                    "Transferred",
                    "Answers per second that go on at another instance, by why.",
                    "ops",
                    {
                        why: per_s("triptych_kv_transfers_total", f'why="{why}"') + " or vector(0)"
                        for why in ("asked", "switch", "drain", "held_up")
                    },
                    stacked=True,
                ),
                graph(
                    "Lent now",
                    "Text requests at encoders that lend, and these encoders by state, as the routers see them.",
                    "short",
                    {"requests": "sum(triptych_requests_lent)", "{{state}}": "max by (state) (triptych_lenders)"},
                ),
                graph(
                    "Lent and taken back",
                    "Requests given to encoders that lend, by where they come from; and taken back without a token, by why.",
                    "reqps",
                    {
                        "{{how}}": per_s("triptych_lent_requests_total", by="how"),
                        "back: {{reason}}": per_s("triptych_lent_requests_taken_back_total", by="reason"),
                    },
                ),
            ],
            "Queues": [
                graph(
                    "Longest wait",
                    "Of what is waiting now.",
                    "s",
                    {
                        "router": "max(triptych_router_longest_wait_seconds) or vector(0)",
                        "encoder": "max(triptych_encoder_longest_wait_seconds) or vector(0)",
                        "text": "max(triptych_longest_wait_seconds) or vector(0)",
                    },
                ),
                graph(
                    "Pending at encoders",
                    "Items, and their tokens.",
                    "short",
                    {
                        "items": "sum(triptych_encoder_items_pending)",
                        "tokens": "sum(triptych_encoder_tokens_pending)",
                    },
                ),
                graph(
                    "Pending at text instances",
                    "Tokens to prefill or decode.",
                    "short",
                    {"tokens": "sum(triptych_text_tokens_pending)"},
                ),
            ],
            "Control plane": [
                graph(
                    "Managers",
                    "One leads. The store and the scaler are 0 while they do not answer.",
                    "short",
                    {
                        "lead": "sum(triptych_pool_manager_leads)",
                        "store": "min(triptych_pool_store_up)",
                        "scaler": "min(triptych_pool_scaler_up)",
                    },
                ),
                graph(
                    "Age of the list of members",
                    "Since a manager last confirmed it to a router or gateway.",
                    "s",
                    {"{{job}}": "max by (job) (triptych_membership_age_seconds)"},
                ),
                graph(
                    "Watchers and registrations",
                    "Routers and gateways that follow a manager; managers that each process is registered with.",
                    "short",
                    {
                        "watchers": "sum(triptych_pool_watchers)",
                        "registrations {{job}}": "min by (job) (triptych_pool_registrations)",
                    },
                ),
                graph(
                    "Streams",
                    "Open streams that last as long as their client, by method, at all services.",
                    "short",
                    {"{{method}}": "sum by (method) (triptych_rpc_server_streams)"},
                ),
            ],
        },
    )


def transfer() -> schema.Dashboard:
    pulls = per_s("triptych_transfer_seconds_count", by="backend")
    failures = per_s("triptych_transfer_failures_total", by="backend")
    return laid_out(
        board(
            "triptych-transfer",
            "Triptych: transfer and caches",
            "How embeddings reach text instances, what caches save, and which memory is short.",
        ),
        {
            "Transfer": [
                graph(
                    "Pulls",
                    "By transport.",
                    "ops",
                    {"{{backend}}": pulls},
                    stacked=True,
                ),
                graph(
                    "Bytes",
                    "By transport.",
                    "Bps",
                    {"{{backend}}": per_s("triptych_transfer_bytes_total", by="backend")},
                    stacked=True,
                ),
                graph(
                    "One pull, P99",
                    "Until it is verified.",
                    "s",
                    {"{{backend}}": quantile(0.99, "triptych_transfer_seconds", by="le, backend")},
                ),
                graph(
                    "Failed pulls",
                    "Their items are encoded again.",
                    "ops",
                    {"{{backend}}": f"{failures} or 0 * {pulls}"},
                ),
                graph(
                    "Pulls in hand",
                    "At text instances.",
                    "short",
                    {"waiting": "sum(triptych_pulls_waiting)", "running": "sum(triptych_pulls_running)"},
                    stacked=True,
                ),
                graph(
                    "Connections, resets",
                    "Connections to encoders' memory; resets of transports within an hour.",
                    "short",
                    {
                        "{{backend}}": "sum by (backend) (triptych_connections)",
                        "resets": "sum(increase(triptych_transport_resets_total[1h])) or vector(0)",
                    },
                ),
            ],
            "Caches": [
                graph(
                    "Where embeddings were found",
                    "Items of answered requests, by the cache that had their embedding.",
                    "ops",
                    {"{{where}}": per_s("triptych_embedding_cache_total", by="where")},
                    stacked=True,
                ),
                graph(
                    "Hit rates",
                    "Of embeddings at encoders and in text instances (by item), and of the prefix cache (by token).",
                    "percentunit",
                    {
                        "encoder": share(
                            rate("triptych_encoder_items_total", 'cached="yes"'), rate("triptych_encoder_items_total")
                        ),
                        "text": share(
                            rate("triptych_image_cache_total", 'hit="yes"'), rate("triptych_image_cache_total")
                        ),
                        "prefix": share(
                            rate("vllm:prefix_cache_hits_total", _MODEL),
                            rate("vllm:prefix_cache_queries_total", _MODEL),
                        ),
                    },
                    whole=True,
                ),
                graph(
                    "Hints of embeddings",
                    "Items sent to an encoder that was believed to hold their embedding (hit, or stale if it did not) or to encode it.",
                    "ops",
                    {"{{outcome}}": per_s("triptych_embedding_hints_followed_total", by="outcome")},
                    stacked=True,
                ),
                graph(
                    "Embeddings that are kept",
                    "By arena; and those that the router with the most hints believes encoders to hold.",
                    "short",
                    {
                        "{{arena}}": "sum by (arena) (triptych_arena_embeddings)",
                        "hints": "max(triptych_embedding_hints)",
                    },
                ),
            ],
            "Memory": [
                graph(
                    "Arenas in use",
                    "Share of the fullest that is leased, in use, being written or in quarantine.",
                    "percentunit",
                    {"{{arena}}": "max by (arena) (triptych_arena_leased_bytes / triptych_arena_capacity_bytes)"},
                    whole=True,
                ),
                graph(
                    "Arenas with cached embeddings",
                    "Share of the fullest.",
                    "percentunit",
                    {"{{arena}}": "max by (arena) (triptych_arena_cached_bytes / triptych_arena_capacity_bytes)"},
                    whole=True,
                ),
                graph(
                    "KV memory",
                    "Share of the fullest text instance. Preempted sequences are copied back from host memory, else computed again.",
                    "percentunit",
                    {
                        "in use": f"max(vllm:kv_cache_usage_perc{{{_MODEL}}})",
                        "preemptions/s": per_s("vllm:num_preemptions_total", _MODEL),
                        "copied back/s": per_s("triptych_kv_copies_total", 'direction="back"'),
                    },
                ),
                graph(
                    "Segments of keys and values",
                    "Per second, by what becomes of them: sealed for an answer that goes on elsewhere or cached already, kept for prompts that begin alike; at the reader pulled, found, lost, or computed.",
                    "ops",
                    {
                        outcome: per_s("triptych_kv_segments_total", f'outcome="{outcome}"') + " or vector(0)"
                        for outcome in ("sealed", "cached", "kept", "pulled", "found", "lost", "computed")
                    },
                ),
                graph(
                    "Prefixes of other instances",
                    "Tokens per second that are pulled instead of computed; leases that their holders grant and refuse.",
                    "short",
                    {
                        "tokens/s": per_s("triptych_kv_prefix_tokens_total") + " or vector(0)",
                        "leases {{outcome}}/s": per_s("triptych_kv_prefix_leases_total", by="outcome"),
                    },
                ),
                graph(
                    "Waiting for memory",
                    "Requests at routers for room in the encoders' arenas, and at text instances for room in theirs.",
                    "short",
                    {
                        "routers": "sum(triptych_requests_waiting_for_credits)",
                        "text": "sum(triptych_requests_waiting_for_memory)",
                    },
                    stacked=True,
                ),
                graph(
                    "Leases and credits",
                    "Leases on embeddings at encoders, and credits of routers. Both fall to 0 when nothing runs.",
                    "short",
                    {"leases": "sum(triptych_arena_leases)", "credits": "sum(triptych_credits_outstanding)"},
                ),
                graph(
                    "Bytes in hand",
                    "Media of running requests at routers, bodies at gateways, running pulls.",
                    "bytes",
                    {
                        "media": "sum(triptych_router_media_bytes)",
                        "bodies": "sum(triptych_http_body_bytes)",
                        "pulls": "sum(triptych_pulls_running_bytes)",
                    },
                    stacked=True,
                ),
            ],
        },
    )


_ONE_REQUEST = """
These panels show where the time of *all* requests goes, stage by stage. For **one** request:

- its timeline, with each item and stage: `GET /v1/requests/ID/timeline` with the key of its caller, or `triptych chat --timeline`. `ID` is the header `x-request-id` of the answer;
- its log lines: the same id in the logs of all services; the router's line has every stage;
- its trace, if traces are collected (`--otlp-endpoint`): log lines have the `trace_id`. With a Tempo data source in Grafana, enter it above and open the row *Trace*.
"""


def anatomy() -> schema.Dashboard:
    stages = 'stage=~"prepare|encode|queue|pull|prefill|decode"'
    made = board(
        "triptych-request", "Triptych: anatomy of a request", "Where the time of a request goes, hop by hop."
    ).with_variable(dashboard.TextBoxVariable("trace").label("Trace id"))
    made = made.with_variable(dashboard.DatasourceVariable("traces").label("Traces").type("tempo"))
    trace = (
        dashboard.Row("Trace (needs a Tempo data source)")
        .collapsed(True)
        .with_panel(
            dashboard.Panel()
            .type("traces")
            .title("Trace $trace")
            .description("The spans of one request in gateway, router, encoders and text instance.")
            .datasource(schema.DataSourceRef(type_val="tempo", uid="${traces}"))
            .span(24)
            .height(16)
            .with_target(tempo.TempoQuery().ref_id("A").query_type("traceql").query("$trace"))
        )
    )
    return laid_out(
        made.with_panel(
            markdown.Panel()
            .title("One request")
            .description("How to see a single one.")
            .content(_ONE_REQUEST.strip())
            .span(24)
            .height(6)
        ).with_row(trace),
        {
            "Stages": [
                graph(
                    "Mean of each stage",
                    "Of answered requests, at the router. Encode and pull are of requests with media.",
                    "s",
                    {"{{stage}}": mean("triptych_stage_seconds", "stage", stages)},
                    stacked=True,
                ),
                graph(
                    "P50 of each stage",
                    "Half of the requests took less.",
                    "s",
                    {"{{stage}}": quantile(0.5, "triptych_stage_seconds", stages, by="le, stage")},
                ),
                graph(
                    "P99 of each stage",
                    "One in a hundred took longer.",
                    "s",
                    {"{{stage}}": quantile(0.99, "triptych_stage_seconds", stages, by="le, stage")},
                ),
                buckets(
                    "Time to first token",
                    "Requests per second, by latency.",
                    "vllm:time_to_first_token_seconds",
                    _REQUESTS,
                ),
                buckets(
                    "Whole request", "Requests per second, by latency.", "vllm:e2e_request_latency_seconds", _REQUESTS
                ),
            ],
            "At each service": [
                graph(
                    "Gateway",
                    "P99 from a request's head to the end of its answer, by route.",
                    "s",
                    {"{{route}}": quantile(0.99, "triptych_http_seconds", _API, by="le, route")},
                ),
                graph(
                    "Calls",
                    "P99 from a call's arrival to its end, by method.",
                    "s",
                    {"{{method}}": quantile(0.99, "triptych_rpc_server_seconds", by="le, method")},
                ),
                graph(
                    "Encoder",
                    "P99 of items: waiting for a batch, and encoding it.",
                    "s",
                    {"{{stage}}": quantile(0.99, "triptych_encoder_stage_seconds", by="le, stage")},
                ),
                graph(
                    "Text instance",
                    "P99 of requests: waiting, pulling embeddings, prefill, decode.",
                    "s",
                    {"{{stage}}": quantile(0.99, "triptych_text_stage_seconds", by="le, stage")},
                ),
                graph(
                    "Prefill and decode",
                    "P99 at the router, under vLLM's names.",
                    "s",
                    {
                        "queue": quantile(0.99, "vllm:request_queue_time_seconds", _REQUESTS),
                        "prefill": quantile(0.99, "vllm:request_prefill_time_seconds", _REQUESTS),
                        "decode": quantile(0.99, "vllm:request_decode_time_seconds", _REQUESTS),
                    },
                ),
                graph(
                    "Done again",
                    "Attempts that repeat one that failed, for each attempt.",
                    "percentunit",
                    {
                        "encode": share(
                            rate("triptych_attempts_total", 'kind="encode_again"'),
                            rate("triptych_attempts_total", 'kind="encode"'),
                        ),
                        "text": share(
                            rate("triptych_attempts_total", 'kind="text_again"'),
                            rate("triptych_attempts_total", 'kind="text"'),
                        ),
                    },
                ),
            ],
            "Sizes": [
                graph(
                    "Prompt",
                    "Tokens, positions of media included.",
                    "short",
                    quantiles("vllm:request_prompt_tokens", _REQUESTS),
                ),
                graph("Answer", "Tokens.", "short", quantiles("vllm:request_generation_tokens", _REQUESTS)),
                graph(
                    "Time per output token",
                    "Mean over the tokens of a request after the first.",
                    "s",
                    quantiles("vllm:request_time_per_output_token_seconds", _REQUESTS),
                ),
            ],
        },
    )


DASHBOARDS = {"overview": overview, "pools": pools, "transfer": transfer, "request": anatomy}


def files() -> dict[Path, str]:
    """The content of each dashboard's file."""
    encoder = JSONEncoder(sort_keys=True, indent=1)
    return {FOLDER / f"{name}.json": encoder.encode(made()) + "\n" for name, made in DASHBOARDS.items()}


if __name__ == "__main__":
    raise SystemExit(run("scripts.dashboards", __doc__ or "", files))
