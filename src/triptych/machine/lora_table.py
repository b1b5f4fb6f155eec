"""The LoRA adapters of an engine, by their names: which take requests, and which wait for the end of those that run."""

from triptych.domain.lora import LoadedLora, LoraLimits, is_lora_name
from triptych.errors import InvalidRequest, ModelNotFound


class LoraTable:
    """Owner of which LoRA adapters take requests, under which names. An adapter is *loaded*, then *leaving* until its last request has ended, then forgotten."""

    def __init__(self, limits: LoraLimits, model_id: str) -> None:
        """``model_id``: of the base, whose name no adapter may have."""
        self._limits = limits
        self._model_id = model_id
        self._loaded: dict[str, LoadedLora] = {}
        """By name."""
        self._leaving: dict[str, LoadedLora] = {}
        """By digest."""

    @property
    def loaded(self) -> tuple[LoadedLora, ...]:
        """Those that take requests, by name."""
        return tuple(self._loaded[name] for name in sorted(self._loaded))

    def takes(self, digest: str) -> bool:
        """Whether a new request with this adapter is taken."""
        return any(lora.digest == digest for lora in self._loaded.values())

    def is_leaving(self, digest: str) -> bool:
        return digest in self._leaving

    def check_name(self, name: str) -> None:
        """Raises InvalidRequest for a name that no further adapter can have."""
        if not is_lora_name(name):
            raise InvalidRequest(
                f"a LoRA adapter's name has 1 to 128 of A-Z a-z 0-9 . _ : / - and begins with a letter or digit, not {name[:140]!r}",
                param="name",
            )
        if name == self._model_id:
            raise InvalidRequest(f"{name!r} is the name of the base model", param="name")
        if name in self._loaded:
            raise InvalidRequest(f"a LoRA adapter {name!r} is loaded already: unload it first", param="name")
        if len(self._loaded) >= self._limits.max_loras:
            raise InvalidRequest(f"{len(self._loaded)} LoRA adapters are loaded, which is the limit", param="name")

    def check(self, lora: LoadedLora) -> None:
        """Raises InvalidRequest for an adapter that cannot be added."""
        self.check_name(lora.name)
        if (twin := next((other for other in self._loaded.values() if other.digest == lora.digest), None)) is not None:
            raise InvalidRequest(f"the same LoRA adapter is loaded as {twin.name!r}", param="directory")
        others = {other.digest: other.nbytes for other in (*self._loaded.values(), *self._leaving.values())}
        others.pop(lora.digest, None)
        if (nbytes := sum(others.values())) + lora.nbytes > self._limits.max_lora_bytes:
            raise InvalidRequest(
                f"the LoRA adapter takes {lora.nbytes} bytes, others take {nbytes}, and the limit is {self._limits.max_lora_bytes}",
                param="directory",
            )

    def add(self, lora: LoadedLora) -> None:
        """Take requests for it from now on, also if it was leaving. Raises as ``check``."""
        self.check(lora)
        self._leaving.pop(lora.digest, None)
        self._loaded[lora.name] = lora

    def leave(self, name: str) -> LoadedLora:
        """Take no more requests for it. Raises ModelNotFound."""
        if (lora := self._loaded.pop(name, None)) is None:
            raise ModelNotFound(f"no LoRA adapter {name!r} is loaded", param="name")
        self._leaving[lora.digest] = lora
        return lora

    def forget(self, digest: str) -> None:
        """Its memory is free."""
        del self._leaving[digest]
