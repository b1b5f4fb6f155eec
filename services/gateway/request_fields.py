"""The table of request fields: who defines each, and what the gateway does with it.

Served fields are those of ``openai_models``. A field that would change the answer, and is not served, is refused unless its
value is harmless. All others, also those that nobody defines, are named in the header ``x-triptych-ignored``.
``python -m scripts.request_fields`` writes the table into docs/rest.md.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from triptych.errors import InvalidRequest

from .openai_fields import shown

HEADER = "x-triptych-ignored"
MAX_NAMED = 32
"""Fields that the header names."""
_NAME = re.compile(r"[\w.\[\]-]{1,100}", re.ASCII)
_NAMES = {"O": "OpenAI", "V": "vLLM", "S": "SGLang"}
_UNNAMED = "..."
"""Stands for names that are too many, or no names."""


class Use(Enum):
    SERVED = "served"
    REFUSED = "refused"
    IGNORED = "no effect"


class On(Enum):
    """The route whose requests may have the field."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Row:
    """A field. ``by`` has the initials of OpenAI, vLLM and SGLang, as far as they define it; ``harmless`` values are not refused."""

    name: str
    by: str
    use: Use
    why: str = ""
    harmless: tuple[object, ...] = (None,)
    on: On = On.BOTH


def _rows(
    use: Use, by: str, names: str, why: str = "", harmless: tuple[object, ...] = (), on: On = On.BOTH
) -> Iterator[Row]:
    for name in names.split():
        yield Row(name, by, use, why, (None, *harmless), on)


_C, _P = On.CHAT, On.COMPLETIONS
_WORKS = "not supported"
ROWS: tuple[Row, ...] = (
    *_rows(
        Use.SERVED,
        "OVS",
        "model stream stream_options max_tokens temperature top_p n stop seed logprobs logit_bias "
        "frequency_penalty presence_penalty",
    ),
    *_rows(
        Use.SERVED,
        "OVS",
        "messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls",
        on=_C,
    ),
    *_rows(Use.SERVED, "OVS", "response_format", "type `structural_tag` is refused"),
    *_rows(Use.SERVED, "OVS", "prompt", "one string; lists of several, and token ids, are refused", on=_P),
    *_rows(Use.SERVED, "OS", "best_of", "only 1, or as many as `n`", on=_P),
    *_rows(
        Use.SERVED,
        "VS",
        "top_k min_p min_tokens repetition_penalty stop_token_ids ignore_eos skip_special_tokens cache_salt priority",
    ),
    *_rows(Use.SERVED, "O", "service_tier", "[a priority](#priority)"),
    *_rows(
        Use.SERVED, "OVS", "reasoning_effort", "a variable of the chat template; no effect where it has none", on=_C
    ),
    *_rows(Use.SERVED, "VS", "chat_template_kwargs", "[variables of the chat template](#reasoning)", on=_C),
    *_rows(Use.SERVED, "V", "include_reasoning", "[reasoning](#reasoning)", on=_C),
    *_rows(Use.SERVED, "S", "separate_reasoning", "[reasoning](#reasoning)", on=_C),
    *_rows(Use.SERVED, "V", "structured_outputs guided_json", "`json` and `json_object`; the rest is refused"),
    # --- refused
    *_rows(Use.REFUSED, "O", "functions", "use `tools`", ([],), _C),
    *_rows(Use.REFUSED, "O", "function_call", "use `tools`", ("none", "auto"), _C),
    *_rows(Use.REFUSED, "O", "modalities", "answers are text", ([], ["text"]), _C),
    *_rows(Use.REFUSED, "O", "audio prediction web_search_options moderation", _WORKS, (), _C),
    *_rows(Use.REFUSED, "O", "verbosity", _WORKS, ("medium",), _C),
    *_rows(Use.REFUSED, "OVS", "echo", _WORKS, (False,)),
    *_rows(Use.REFUSED, "OVS", "suffix", _WORKS, ("",), _P),
    *_rows(
        Use.REFUSED,
        "V",
        "use_beam_search watermarking include_stop_str_in_output return_tokens_as_token_ids return_token_offsets return_mm_kwargs",
        _WORKS,
        (False,),
    ),
    *_rows(Use.REFUSED, "V", "return_prompt_text", _WORKS, (False,), _C),
    *_rows(Use.REFUSED, "VS", "return_token_ids", "use `logprobs`", (False,)),
    *_rows(
        Use.REFUSED,
        "V",
        "truncate_prompt_tokens prompt_logprobs logprob_token_ids allowed_token_ids repetition_detection mm_payload "
        "thinking_token_budget guided_regex guided_choice guided_grammar guided_whitespace_pattern",
        _WORKS,
    ),
    *_rows(
        Use.REFUSED,
        "V",
        "structured_outputs.regex structured_outputs.choice structured_outputs.grammar structured_outputs.structural_tag "
        "structured_outputs.whitespace_pattern",
        _WORKS,
    ),
    *_rows(
        Use.REFUSED,
        "V",
        "structured_outputs.disable_any_whitespace structured_outputs.disable_additional_properties "
        "structured_outputs.disable_fallback",
        _WORKS,
        (False,),
    ),
    *_rows(Use.REFUSED, "V", "bad_words", _WORKS, ([],)),
    *_rows(Use.REFUSED, "V", "vllm_xargs", _WORKS, ({},)),
    *_rows(Use.REFUSED, "V", "kv_transfer_params ec_transfer_params", "the router decides on transfers", ({},)),
    *_rows(Use.REFUSED, "V", "media_io_kwargs mm_processor_kwargs", "the model's processor decides", ({},), _C),
    *_rows(Use.REFUSED, "V", "documents", _WORKS, ([],), _C),
    *_rows(Use.REFUSED, "V", "chat_template", "the model's own is used", (), _C),
    *_rows(Use.REFUSED, "V", "add_generation_prompt", _WORKS, (True,), _C),
    *_rows(Use.REFUSED, "VS", "continue_final_message", _WORKS, (False,), _C),
    *_rows(Use.REFUSED, "V", "add_special_tokens", "the template decides", (False,), _C),
    *_rows(Use.REFUSED, "V", "add_special_tokens", _WORKS, (True,), _P),
    *_rows(Use.REFUSED, "V", "prompt_embeds", _WORKS, (), _P),
    *_rows(
        Use.REFUSED,
        "S",
        "regex ebnf custom_logit_processor session_params",
        _WORKS,
    ),
    *_rows(Use.REFUSED, "S", "json_schema", "use `response_format`", (), _P),
    *_rows(Use.REFUSED, "S", "stop_regex", _WORKS, ([],)),
    *_rows(Use.REFUSED, "S", "custom_params images_config", _WORKS, ({},)),
    *_rows(Use.REFUSED, "S", "lora_path", "name the adapter as `model`"),
    *_rows(
        Use.REFUSED,
        "S",
        "no_stop_trim return_hidden_states return_routed_experts return_cached_tokens_details",
        _WORKS,
        (False,),
    ),
    *_rows(Use.REFUSED, "S", "return_prompt_token_ids return_meta_info use_audio_in_video", _WORKS, (False,), _C),
    *_rows(Use.REFUSED, "S", "max_dynamic_patch min_dynamic_patch input_ids task", _WORKS, (), _C),
    *_rows(Use.REFUSED, "S", "reasoning", "use `reasoning_effort`", ({},), _C),
    *_rows(Use.REFUSED, "O", "messages[].function_call messages[].audio", "use `tool_calls`, or text", (), _C),
    *_rows(Use.REFUSED, "S", "messages[].tools", "use `tools`", ([],), _C),
    # --- without effect
    *_rows(Use.IGNORED, "OVS", "user", "tenants are API keys"),
    *_rows(Use.IGNORED, "O", "safety_identifier", "tenants are API keys", on=_C),
    *_rows(Use.IGNORED, "O", "metadata store", "nothing is stored", on=_C),
    *_rows(
        Use.IGNORED,
        "O",
        "prompt_cache_key prompt_cache_options prompt_cache_retention",
        "prefixes are found by their content",
        on=_C,
    ),
    *_rows(Use.IGNORED, "V", "request_id", "use the header `x-request-id`"),
    *_rows(Use.IGNORED, "S", "rid", "use the header `x-request-id`"),
    *_rows(Use.IGNORED, "VS", "session_id", "the router places requests"),
    *_rows(
        Use.IGNORED,
        "S",
        "bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank",
        "the router places requests",
    ),
    *_rows(Use.IGNORED, "V", "length_penalty", "for beam search alone"),
    *_rows(Use.IGNORED, "V", "truncation_side", "nothing is truncated"),
    *_rows(Use.IGNORED, "V", "spaces_between_special_tokens", "for slow tokenizers alone"),
    *_rows(Use.IGNORED, "V", "stream_interval guided_decoding_backend", "the server decides"),
    *_rows(Use.IGNORED, "S", "stream_reasoning", "the server decides", on=_C),
    *_rows(Use.IGNORED, "V", "routed_experts_prompt_start", "experts are not returned"),
    *_rows(Use.IGNORED, "S", "routed_experts_start_len", "experts are not returned"),
    *_rows(Use.IGNORED, "S", "extra_key ngram_corpus_id", "of SGLang's caches"),
    *_rows(Use.IGNORED, "S", "custom_labels", "metrics have labels of their own", on=_P),
    *_rows(Use.IGNORED, "OVS", "messages[].name", "chat templates name roles alone", on=_C),
    *_rows(Use.IGNORED, "O", "messages[].refusal messages[].annotations", "parts of answers", on=_C),
    *_rows(Use.IGNORED, "V", "messages[].content[].uuid", "items are known by their content", on=_C),
    *_rows(
        Use.IGNORED,
        "OVS",
        "messages[].content[].image_url.detail messages[].content[].input_audio.format",
        "the model's processor and the bytes decide",
        on=_C,
    ),
    *_rows(Use.IGNORED, "O", "stream_options.include_obfuscation", "padding of chunks"),
    *_rows(Use.IGNORED, "VS", "stream_options.continuous_usage_stats", "usage comes at the end"),
    *_rows(Use.IGNORED, "OVS", "tools[].function.strict", "only forced calls are constrained", on=_C),
    *_rows(
        Use.IGNORED,
        "OVS",
        "response_format.json_schema.strict response_format.json_schema.description",
        "every schema is kept strictly",
    ),
)


def rows_of(route: On) -> Mapping[str, Row]:
    return {row.name: row for row in ROWS if row.on in (route, On.BOTH)}


_BY_ROUTE = {route: rows_of(route) for route in (On.CHAT, On.COMPLETIONS)}


def is_ignored(name: str, value: object, route: On) -> bool:
    """Whether a field that is not served has no effect; False for a harmless value. Raises InvalidRequest for others."""
    row = _BY_ROUTE[route].get(name)
    if row is None or row.use is Use.IGNORED:
        return value is not None
    if not any(type(value) is type(harmless) and value == harmless for harmless in row.harmless):
        raise InvalidRequest(
            f"{name}: this is not supported; leave it out (got {shown(value)})", param=name.replace("[]", "")
        )
    return False


def header_of(names: Iterable[str]) -> str:
    """The value of the header: the names, which clients choose, within limits."""
    every = sorted(set(names))
    good = [name for name in every if _NAME.fullmatch(name)][:MAX_NAMED]
    return ", ".join([*good, *([_UNNAMED] if len(good) < len(every) else [])])


def refused_properties(route: On) -> dict[str, Any]:
    """The refused fields of a body, as properties for the OpenAPI document."""
    return {
        row.name: {"enum": list(row.harmless), "description": f"Refused otherwise: {row.why}."}
        for row in _BY_ROUTE[route].values()
        if row.use is Use.REFUSED and "." not in row.name
    }


def table() -> str:
    """The table in Markdown: one row for fields that are treated alike for the same reason."""
    groups: dict[tuple[Use, str, str], list[str]] = {}
    for row in ROWS:
        groups.setdefault((row.use, row.by, row.why), []).append(f"`{row.name}`")
    lines = ["| | defined by | fields | |", "|---|---|---|---|"]
    for (use, by, why), names in groups.items():
        definers = ", ".join(_NAMES[initial] for initial in by)
        lines.append(f"| {use.value} | {definers} | {', '.join(dict.fromkeys(names))} | {why} |")
    return "\n".join(lines)
