"""The table of request fields: who defines each, and what the gateway does with it.

Served fields are those of ``openai_models``, ``responses_models`` and ``messages_models``. A field that would change the answer, and is not served, is refused unless its
value is harmless. All others, also those that nobody defines, are named in the header ``x-triptych-ignored``.
``python -m scripts.request_fields`` writes the table into docs/rest.md.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from triptych.errors import InvalidRequest

from .openai_fields import Keeping, shown

HEADER = "x-triptych-ignored"
MAX_NAMED = 32
"""Fields that the header names."""
_NAME = re.compile(r"[\w.\[\]-]{1,100}", re.ASCII)
_NAMES = {"O": "OpenAI", "V": "vLLM", "S": "SGLang", "A": "Anthropic"}
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
    """Chat and plain completions."""
    RESPONSES = "responses"
    MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class Row:
    """A field. ``by`` has the initials of OpenAI, vLLM, SGLang and Anthropic, as far as they define it; ``harmless`` values are not refused."""

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


_C, _P, _R, _M = On.CHAT, On.COMPLETIONS, On.RESPONSES, On.MESSAGES
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
    *_rows(Use.SERVED, "OVS", "prompt", "at most 64, as text or token ids", on=_P),
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
    # --- Responses
    *_rows(
        Use.SERVED,
        "OV",
        "model input instructions previous_response_id store stream max_output_tokens temperature top_p tools "
        "parallel_tool_calls metadata service_tier top_logprobs",
        on=_R,
    ),
    *_rows(Use.SERVED, "OV", "tool_choice", "a word, or a function by name", on=_R),
    *_rows(Use.SERVED, "OV", "text", "`format`", on=_R),
    *_rows(Use.SERVED, "OV", "reasoning", "`effort`, a variable of the chat template", on=_R),
    *_rows(Use.SERVED, "OV", "include", "`message.output_text.logprobs`; the rest has no effect", on=_R),
    *_rows(
        Use.SERVED,
        "V",
        "top_k min_p seed stop stop_token_ids ignore_eos repetition_penalty frequency_penalty presence_penalty logit_bias "
        "skip_special_tokens include_reasoning chat_template_kwargs cache_salt priority",
        "as in chat",
        on=_R,
    ),
    *_rows(Use.REFUSED, "OV", "background", _WORKS, (False,), _R),
    *_rows(Use.REFUSED, "OV", "prompt", _WORKS, (), _R),
    *_rows(Use.REFUSED, "OV", "truncation", _WORKS, ("disabled",), _R),
    *_rows(Use.REFUSED, "O", "conversation", "use `previous_response_id`", (), _R),
    *_rows(Use.REFUSED, "O", "access_programs background_options moderation image", _WORKS, ({},), _R),
    *_rows(Use.REFUSED, "O", "context_management", _WORKS, ([],), _R),
    *_rows(Use.REFUSED, "O", "text.verbosity", _WORKS, ("medium",), _R),
    *_rows(Use.REFUSED, "O", "reasoning.mode", _WORKS, ("standard",), _R),
    *_rows(Use.REFUSED, "O", "input[].encrypted_content", "of another server", ("",), _R),
    *_rows(Use.REFUSED, "O", "input[].content[].file_id input[].output[].file_id", "no files are kept", (), _R),
    *_rows(
        Use.REFUSED,
        "V",
        "include_stop_str_in_output watermarking return_mm_kwargs enable_response_messages",
        _WORKS,
        (False,),
        _R,
    ),
    *_rows(Use.REFUSED, "V", "structured_outputs", "use `text.format`", (), _R),
    *_rows(Use.REFUSED, "V", "mm_payload previous_input_messages", _WORKS, (), _R),
    *_rows(
        Use.REFUSED,
        "V",
        "kv_transfer_params ec_transfer_params media_io_kwargs mm_processor_kwargs vllm_xargs",
        "the server decides",
        ({},),
        _R,
    ),
    *_rows(Use.REFUSED, "O", "tools[].defer_loading", _WORKS, (False,), _R),
    *_rows(Use.REFUSED, "O", "tools[].allowed_callers", _WORKS, (["direct"],), _R),
    *_rows(Use.IGNORED, "OV", "user", "tenants are API keys", on=_R),
    *_rows(Use.IGNORED, "O", "safety_identifier", "tenants are API keys", on=_R),
    *_rows(
        Use.IGNORED,
        "O",
        "prompt_cache_key prompt_cache_options prompt_cache_retention input[].content[].prompt_cache_breakpoint",
        "prefixes are found by their content",
        on=_R,
    ),
    *_rows(Use.IGNORED, "OV", "max_tool_calls", "for tools of the server, of which there are none", on=_R),
    *_rows(Use.IGNORED, "O", "stream_options", "padding of events", on=_R),
    *_rows(
        Use.IGNORED,
        "O",
        "reasoning.summary reasoning.generate_summary reasoning.context",
        "reasoning is shown as it is",
        on=_R,
    ),
    *_rows(Use.IGNORED, "O", "text.format.strict text.format.description", "every schema is kept strictly", on=_R),
    *_rows(Use.IGNORED, "O", "tools[].strict", "only forced calls are constrained", on=_R),
    *_rows(
        Use.IGNORED,
        "O",
        "input[].id input[].status input[].phase input[].content[].annotations input[].content[].logprobs",
        "parts of answers",
        on=_R,
    ),
    *_rows(
        Use.IGNORED,
        "O",
        "input[].content[].detail input[].output[].detail input[].content[].input_audio.format",
        "the model's processor and the bytes decide",
        on=_R,
    ),
    *_rows(Use.IGNORED, "V", "request_id", "use the header `x-request-id`", on=_R),
    *_rows(Use.IGNORED, "V", "session_id", "the router places requests", on=_R),
    # --- Messages
    *_rows(
        Use.SERVED,
        "AV",
        "model messages max_tokens system stream temperature top_p top_k stop_sequences tools tool_choice",
        on=_M,
    ),
    *_rows(Use.SERVED, "AV", "thinking", "`enable_thinking` and `thinking_budget` of the chat template", on=_M),
    *_rows(Use.SERVED, "AV", "output_config", "`format`, and `effort` as `reasoning_effort`", on=_M),
    *_rows(Use.SERVED, "V", "cache_salt chat_template_kwargs", "as in chat", on=_M),
    *_rows(Use.REFUSED, "A", "container mcp_servers context_management", _WORKS, ([], {}), _M),
    *_rows(Use.REFUSED, "A", "speed", _WORKS, ("standard",), _M),
    *_rows(Use.REFUSED, "A", "tools[].defer_loading", _WORKS, (False,), _M),
    *_rows(Use.REFUSED, "A", "tools[].allowed_callers", _WORKS, (["direct"],), _M),
    *_rows(Use.REFUSED, "A", "messages[].content[].transformations", _WORKS, ({},), _M),
    *_rows(Use.REFUSED, "V", "watermarking return_mm_kwargs", _WORKS, (False,), _M),
    *_rows(Use.REFUSED, "V", "mm_payload", _WORKS, (), _M),
    *_rows(Use.REFUSED, "V", "kv_transfer_params ec_transfer_params vllm_xargs", "the server decides", ({},), _M),
    *_rows(
        Use.IGNORED,
        "A",
        "cache_control messages[].content[].cache_control messages[].content[].content[].cache_control "
        "system[].cache_control tools[].cache_control",
        "prefixes are found by their content",
        on=_M,
    ),
    *_rows(Use.IGNORED, "AV", "metadata", "tenants are API keys", on=_M),
    *_rows(Use.IGNORED, "A", "user_profile_id workspace_id", "tenants are API keys", on=_M),
    *_rows(Use.IGNORED, "A", "service_tier inference_geo", "the router places requests", on=_M),
    *_rows(Use.IGNORED, "A", "diagnostics", "there are metrics and timelines", on=_M),
    *_rows(Use.IGNORED, "A", "thinking.display", "reasoning is shown as it is", on=_M),
    *_rows(Use.IGNORED, "A", "messages[].content[].signature", "nothing is signed", on=_M),
    *_rows(Use.IGNORED, "A", "messages[].content[].is_error", "the text says it", on=_M),
    *_rows(
        Use.IGNORED,
        "A",
        "messages[].content[].source.media_type messages[].content[].content[].source.media_type",
        "the bytes decide",
        on=_M,
    ),
    *_rows(
        Use.IGNORED,
        "A",
        "tools[].strict tools[].eager_input_streaming tools[].input_examples",
        "only forced calls are constrained, and arguments always come in pieces",
        on=_M,
    ),
)


def rows_of(route: On) -> Mapping[str, Row]:
    both = (On.BOTH,) if route in (On.CHAT, On.COMPLETIONS) else ()
    return {row.name: row for row in ROWS if row.on in (route, *both)}


_BY_ROUTE: Mapping[On, Mapping[str, Row]] = {route: rows_of(route) for route in On if route is not On.BOTH}


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


def undeclared(body: Keeping, route: On, path: str = "") -> Iterator[str]:
    """Fields without effect of a body and its parts. Raises InvalidRequest for those that are refused."""
    for name, value in (body.model_extra or {}).items():
        if is_ignored(path + name, value, route):
            yield path + name
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, Keeping):
            yield from undeclared(value, route, f"{path}{name}.")
        elif isinstance(value, list):
            for part in value:
                if isinstance(part, Keeping):
                    yield from undeclared(part, route, f"{path}{name}[].")


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


def table(*routes: On) -> str:
    """The table of these routes in Markdown: one row for fields that are treated alike for the same reason."""
    groups: dict[tuple[Use, str, str], list[str]] = {}
    for row in ROWS:
        if row.on not in routes:
            continue
        groups.setdefault((row.use, row.by, row.why), []).append(f"`{row.name}`")
    lines = ["| | defined by | fields | |", "|---|---|---|---|"]
    for (use, by, why), names in groups.items():
        definers = ", ".join(_NAMES[initial] for initial in by)
        lines.append(f"| {use.value} | {definers} | {', '.join(dict.fromkeys(names))} | {why} |")
    return "\n".join(lines)
