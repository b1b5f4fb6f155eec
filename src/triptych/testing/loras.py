"""LoRA adapters of fakes."""

from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from triptych.domain.lora import LoadedLora, LoadLora
from triptych.errors import FailedPrecondition, InvalidRequest, ModelNotFound


class NoLoras:
    """Part of a router or a text instance that loads no adapters."""

    async def load_lora(self, order: LoadLora) -> LoadedLora:
        raise FailedPrecondition(f"no LoRA adapter is loaded here, as {order.name!r}")

    async def unload_lora(self, name: str) -> None:
        raise ModelNotFound(f"no LoRA adapter {name!r} is loaded", param="name")


@dataclass(frozen=True, slots=True)
class FakeLoraFiles:
    """``ports.LoraFiles``."""

    digest: str
    nbytes: int
    encodes: bool = False
    rank: int = 1


@dataclass
class FakeLoras:
    """``ports.LoraAccess`` of fake engines. A directory is an adapter if it has a file ``adapter``, whatever that contains; one that changes
    embeddings also has a file ``encodes``.
    """

    digests: set[str] = field(default_factory=set)
    """Those in memory."""

    def read(self, directory: Path) -> FakeLoraFiles:
        try:
            content = (directory / "adapter").read_bytes()
        except OSError:
            raise InvalidRequest("adapter is missing") from None
        digest = blake2b(content, digest_size=32).hexdigest()
        return FakeLoraFiles(digest, len(content), (directory / "encodes").exists())

    def add(self, files: FakeLoraFiles) -> None:
        self.digests.add(files.digest)

    def remove(self, digest: str) -> None:
        self.digests.discard(digest)
