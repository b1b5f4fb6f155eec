"""The process beside a router that has a model's processor, and with it torch and transformers."""

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.media import Modality
from triptych.errors import InvalidMedia, Unavailable
from triptych.families.base import Placeholders
from triptych.families.generic import BlankItem, ModelFacts, Processed
from triptych.families.model_files import BadModel, ModelFiles

_SERVER = "triptych.engine.families.processor_server"
"""Named, not imported: it needs torch."""
_START_S, _ITEM_S = 120.0, 60.0


class ProcessorProcess:
    """``ItemProcessing`` in a process of its own, which is started again if it is lost. Items are processed one by one."""

    def __init__(self, files: ModelFiles) -> None:
        """Starts the process, and waits for it. Raises BadModel."""
        self._directory = str(files.directory.resolve())
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        with self._lock:
            answer = self._start()
        if "error" in answer:
            self.close()
            raise BadModel(str(answer["error"]))
        self.facts = read_facts(answer)

    def processed(self, blank: BlankItem) -> Processed:
        """Raises Unavailable as well, if the process is lost or does not answer in time."""
        with self._lock:
            if self._child is None:
                self._start()
            answer = self._ask(written_blank(blank), _ITEM_S)
        if "error" in answer:
            raise InvalidMedia(str(answer["error"]))
        return read_processed(answer)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            _end(self._child)
            self._child = None

    def _start(self) -> dict[str, Any]:
        """Start the process, and wait until it has the processor. Returns its facts, or an error."""
        self._child = self._started()
        return self._ask({"facts": True}, _START_S)

    def _ask(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        child = self._child
        if child is None or child.stdin is None or child.stdout is None:
            raise AssertionError("the process is started, and has pipes")
        watch = threading.Timer(timeout_s, child.kill)
        watch.start()
        try:
            child.stdin.write(json.dumps(question) + "\n")
            child.stdin.flush()
            answer: dict[str, Any] = json.loads(child.stdout.readline())
        except (OSError, ValueError) as error:
            self.close()
            raise Unavailable("the model's processor was lost while it processed an item") from error
        finally:
            watch.cancel()
        return answer

    def _started(self) -> "subprocess.Popen[str]":
        child = subprocess.Popen(  # noqa: S603 - this interpreter
            [sys.executable, "-m", _SERVER, self._directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        weakref.finalize(self, _end, child)
        return child


def _end(child: "subprocess.Popen[str]") -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was written may not have been read
                pipe.close()


def written_facts(facts: ModelFacts) -> dict[str, Any]:
    """JSON of facts, as ``read_facts`` reads it."""
    return {
        "model_type": facts.model_type,
        "hidden_size": facts.hidden_size,
        "context_length": facts.context_length,
        "targets": {modality.value: list(ids) for modality, ids in facts.targets.items()},
        "placeholder_ids": sorted(facts.placeholder_ids),
        "token_types": {name: sorted(types.items()) for name, types in facts.token_types.items()},
        "layers": {modality.value: count for modality, count in facts.layers.items()},
        "sample_rate_hz": facts.sample_rate_hz,
        "numbered": sorted(modality.value for modality in facts.numbered),
        "prompt_prefix": facts.prompt_prefix,
    }


def read_facts(written: Mapping[str, Any]) -> ModelFacts:
    return ModelFacts(
        written["model_type"],
        written["hidden_size"],
        written["context_length"],
        {Modality(name): tuple(ids) for name, ids in written["targets"].items()},
        frozenset(written["placeholder_ids"]),
        {name: dict(types) for name, types in written["token_types"].items()},
        {Modality(name): count for name, count in written["layers"].items()},
        written["sample_rate_hz"],
        frozenset(map(Modality, written["numbered"])),
        written["prompt_prefix"],
    )


def written_blank(blank: BlankItem) -> dict[str, Any]:
    """JSON of a blank item, as ``read_blank`` reads it."""
    return {**asdict(blank), "modality": blank.modality.value}


def read_blank(written: Mapping[str, Any]) -> BlankItem:
    return BlankItem(**{**written, "modality": Modality(written["modality"])})


def written_processed(processed: Processed) -> dict[str, Any]:
    """JSON of what an item becomes, as ``read_processed`` reads it."""
    return {
        "replacement": [
            part if isinstance(part, str) else [part.token_id, part.count] for part in processed.replacement
        ],
        "extras": [[spec.name, spec.dtype.value, list(spec.shape)] for spec in processed.extras],
        "frames": processed.frames,
        "seen_pixels": processed.seen_pixels,
    }


def read_processed(written: Mapping[str, Any]) -> Processed:
    return Processed(
        tuple(part if isinstance(part, str) else Placeholders(*part) for part in written["replacement"]),
        tuple(TensorSpec(name, DType(dtype), tuple(shape)) for name, dtype, shape in written["extras"]),
        tuple(written["frames"]),
        written["seen_pixels"],
    )
