"""Measure the costs of one part of a model with vLLM, in a process of its own: ``python -m triptych.integrations.vllm.profiling``.

Its command line and its reports are those of ``triptych.engine.profiling``. Bytes of weights are those of the configuration, without
quantization: on a CPU vLLM packs most weights, and then does not say their size.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import DTYPES, Checkpoint
from triptych.engine.profiling import (
    MAX_EMBEDDING_BYTES,
    MODEL_ID,
    Loaded,
    Open,
    Options,
    Profiled,
    ProfiledDecoder,
    ProfiledEncoder,
    main,
    timed,
)
from triptych.families.architecture import Architecture
from triptych.integrations.vllm.release import check_release
from triptych.runtime.process import CannotStart

_MOST_STEP_TOKENS = 16_384
"""Longest prompt that is measured: vLLM reserves memory for a step of so many tokens."""


def load_encoder(checkpoint: Checkpoint, options: Options) -> Profiled:
    check_release()
    from triptych.integrations.vllm.encoder import VllmEncoderEngine

    engine, load_s = timed(
        lambda: VllmEncoderEngine(checkpoint, options.vllm_args, model_id=MODEL_ID, compute=options.compute)
    )
    dtype = DTYPES[options.compute.dtype]
    parameters = Architecture.load(checkpoint.files).encoder((), dtype).parameters
    loaded = Loaded(engine.identity, load_s, parameters * dtype.itemsize, engine.close)
    return ProfiledEncoder(engine, loaded, options.effort)


def load_decoder(checkpoint: Checkpoint, options: Options) -> Profiled:
    """Its steps have room for the longest prompt, whatever the arguments say: a row is one pass."""
    check_release()
    from triptych.integrations.vllm.arguments import cost_options, with_step_tokens
    from triptych.integrations.vllm.engine import VllmTextEngine

    context = checkpoint.family.context_length
    step_tokens = min(options.effort.step_tokens(context), _MOST_STEP_TOKENS)
    arguments = with_step_tokens(options.vllm_args, step_tokens)
    engine, load_s = timed(
        lambda: VllmTextEngine(
            checkpoint,
            arguments,
            model_id=MODEL_ID,
            max_embedding_bytes=MAX_EMBEDDING_BYTES,
            compute=options.compute,
        )
    )
    if not engine.caches_prefixes:
        engine.close()
        raise CannotStart("engine vllm: its prefix cache is off, and prompts after cached tokens cannot be measured")
    as_given = {**engine.identity.options, "vllm": cost_options(options.vllm_args)}
    identity = replace(engine.identity, options=as_given)
    parameters = Architecture.load(checkpoint.files).decoder.parameters
    return ProfiledDecoder(
        engine,
        Loaded(identity, load_s, parameters * DTYPES[options.compute.dtype].itemsize, engine.close),
        options.effort,
        context=context,
        kv_token_nbytes=engine.kv_token_nbytes,
        step_tokens=engine.token_budget,
    )


_ENGINES: Mapping[ModelPart, Open] = {ModelPart.ENCODER: load_encoder, ModelPart.DECODER: load_decoder}


def run(arguments: Sequence[str]) -> int:
    """Reports alone go to the standard output: what vLLM writes there goes to the standard error."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as reports:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return main(arguments, _ENGINES, reports)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
