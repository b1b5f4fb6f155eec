"""vLLM as the encoder engine: its encoders of any model, for items that its own processor prepares or Triptych does (ADR 28)."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import DTYPES, Checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.engine.encoder import AdapterEncoderEngine
from triptych.engine.media.item import Decoding
from triptych.engine.torch_process import prepare_torch
from triptych.integrations.vllm.accepted import ENCODER_ARGUMENTS
from triptych.integrations.vllm.arguments import encoder_args
from triptych.integrations.vllm.families import encoder_adapter
from triptych.integrations.vllm.item_encoder import ItemEncoder
from triptych.integrations.vllm.release import SUPPORTED
from triptych.integrations.vllm.starting import starting, vllm_identity


class VllmEncoderEngine(AdapterEncoderEngine):
    """An ``EncoderEngine`` over a worker of vLLM that has loaded no language model. Raises BadModel and CannotStart at
    construction.

    Items are decoded as with Triptych's own engine. vLLM's scheduler and its caches are not used: a batch is one call of
    vLLM's encoder, or as many as it would make of it, so one that fails leaves nothing behind.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        arguments: str,
        *,
        model_id: str,
        compute: ComputeOptions,
        decoding: Decoding | None = None,
    ) -> None:
        """``arguments`` is a command line of vLLM's engine arguments."""
        adapter = encoder_adapter(checkpoint.family, checkpoint.architecture)
        prepare_torch(compute)
        engine_args = encoder_args(
            arguments, checkpoint, model_id=model_id, compute=compute, normalizes=adapter is None
        )
        values = _values(engine_args)
        options = " ".join(f"{name}={value}" for name, value in values.items())
        self.identity = vllm_identity(checkpoint, ModelPart.ENCODER, compute, options=options)
        with starting():
            config = engine_args.create_engine_config()
            # Elsewhere vLLM has a process for its worker on a CPU.
            config.parallel_config.distributed_executor_backend = "uni"
            self._executor = UniProcExecutor(config)
            (model,) = self._executor.collective_rpc("get_model")
            dtype: torch.dtype = config.model_config.dtype
            made = (
                ItemEncoder(model, config.model_config, checkpoint)
                if adapter is None
                else adapter(_VllmImageEncoder(model, dtype, checkpoint.family.hidden_size), checkpoint)
            )
        self.prepare_cores = 1 if adapter is None else None
        """Items that are preprocessed at the same time; None: as many as there are threads."""
        super().__init__(
            checkpoint,
            made,
            model,
            model_id=model_id,
            dtype=DTYPES[compute.dtype],
            decoding=decoding,
            software={"vllm": SUPPORTED, "torchvision": version("torchvision"), **values},
        )

    def close(self) -> None:
        """Free the memory of vLLM's worker. The engine must not be used afterwards."""
        self._executor.shutdown()
        cleanup_dist_env_and_memory()


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Rows of images, as models of transformers return them."""

    pooler_output: torch.Tensor | Sequence[torch.Tensor]
    deepstack_features: Sequence[torch.Tensor]


class _VllmImageEncoder:
    """An ``ImageEncoder``: vLLM's model, called as one of transformers."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, hidden_size: int) -> None:
        self._model: Any = model
        self.config = self._model.config
        self.device = next(model.parameters()).device
        self.dtype = dtype
        self._hidden_size = hidden_size

    def get_image_features(
        self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor | None = None, *, return_dict: bool
    ) -> _Encoded:
        """Raises RuntimeError, whatever vLLM raises."""
        assert return_dict  # vLLM has nothing else
        grids = {} if image_grid_thw is None else {"image_grid_thw": image_grid_thw.cpu()}
        try:
            embedded = self._model.embed_multimodal(pixel_values=pixel_values, **grids)
        except Exception as error:
            raise RuntimeError("vLLM's encoder failed") from error
        if isinstance(embedded, torch.Tensor):
            return _Encoded(embedded, ())  # all images have as many rows
        # DeepStack rows follow the others in the last dimension.
        rows, *layers = torch.split(torch.cat(list(embedded)), self._hidden_size, dim=-1)
        return _Encoded(torch.split(rows, [len(rows_of_image) for rows_of_image in embedded]), layers)


def _values(hints: Any) -> dict[str, str]:
    """The arguments that change embeddings, by name."""
    given = {name: getattr(hints, name) for name in ENCODER_ARGUMENTS}
    return {name: str(getattr(value, "name", value)) for name, value in given.items() if value is not None}
