"""Settings of an encoder."""

import shlex
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from triptych.engine.encoder_options import EncoderOptions
from triptych.engine.media.limits import DecodeLimits
from triptych.machine.arena.leases import LeaseLimits
from triptych.machine.encoder.batch_queue import BatchLimits
from triptych.rpc.settings import InstanceSettings
from triptych.runtime.settings import SettingsError, service_config
from triptych.transport.arena import HEADER_NBYTES

MIB = 1 << 20


class EncoderSettings(InstanceSettings):
    model_config = service_config("encoder")

    port: int = Field(default=50061, ge=0, le=65535)
    """TCP port for calls; 0 picks a free one and logs it."""

    engine: EncoderOptions = EncoderOptions()
    """The engine that encodes."""

    arena_bytes: int = Field(default=256 * MIB, gt=HEADER_NBYTES)
    """Registered memory for embeddings: leased ones, and a cache in the rest."""
    leases: LeaseLimits = LeaseLimits()
    """Limits of leases."""
    published_embeddings: int = Field(default=16_384, ge=0, le=1 << 20)
    """Most embeddings that routers are told of, those used last; 0 for none. It should exceed what the arena holds."""
    embedding_files: Path | None = None
    """Directory for files of embeddings, which outlive this process; it is made, and must be this user's alone. Encoders of
    one host may share it."""
    embedding_files_bytes: int = Field(default=0, ge=0)
    """Bytes of all files in ``embedding_files`` together; those used longest ago are removed. 0 keeps none."""

    max_item_bytes: int = Field(default=32 * MIB, ge=1)
    """Largest item."""
    max_received_bytes: int = Field(default=512 * MIB, ge=1)
    """Most media bytes of calls in progress; a call that does not fit is refused."""
    batches: BatchLimits = BatchLimits()
    """Limits of the queue and of one batch."""
    prepare_threads: int = Field(default=0, ge=0, le=1024)
    """Threads that preprocess, and processes that decode; 0 for one of each per core, at least
    two. Each is pinned to one NUMA node."""
    decoding: DecodeLimits = DecodeLimits()
    """Limits of decoding one item."""

    @classmethod
    def mounted(cls, command_line: str, instance: InstanceSettings) -> Self:
        """The settings of an encoder within another instance: those of ``command_line``, with those of the whole instance taken from
        ``instance``. Environment and file are read as usual. Raises SettingsError.
        """
        whole = instance.flat(InstanceSettings)
        try:
            settings = cls.load(shlex.split(command_line), below=whole)
        except ValueError as error:
            raise SettingsError(str(error)) from None
        if settings.engine.engine == "vllm":
            raise SettingsError("engine vllm is for encoders that are processes of their own")
        for name, value in settings.flat(InstanceSettings).items():
            if value != whole[name]:
                raise SettingsError(f"{name} belongs to the whole instance; set it outside --mount-encoder")
        return settings

    @model_validator(mode="after")
    def _limits_fit_together(self) -> Self:
        if self.max_item_bytes > self.max_received_bytes:
            raise ValueError(
                f"max_item_bytes ({self.max_item_bytes}) exceeds max_received_bytes ({self.max_received_bytes}): "
                "such an item could never be accepted"
            )
        if self.max_item_bytes + MIB > self.max_message_bytes:
            raise ValueError(
                f"max_message_bytes ({self.max_message_bytes}) leaves less than 1 MiB beside an item of max_item_bytes "
                f"({self.max_item_bytes}): such an item could never be received"
            )
        return self

    @model_validator(mode="after")
    def _each_engine_has_its_own_options(self) -> Self:
        self.check_engine(self.engine.engine, self.engine.vllm_args)
        if self.tensor_parallel > 1 and self.delay_profile is None:
            raise ValueError(f"tensor_parallel is {self.tensor_parallel}, but encoders compute on one device")
        return self

    @model_validator(mode="after")
    def _files_have_a_directory_and_a_bound(self) -> Self:
        if (self.embedding_files is None) is not (self.embedding_files_bytes == 0):
            raise ValueError(
                "embedding_files and embedding_files_bytes belong together: where embeddings are kept, and how many bytes"
            )
        return self
