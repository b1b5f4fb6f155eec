"""Process of a model's processor: ``python -m triptych.engine.families.processor_server DIRECTORY``.

Started by ``tokens.processor_process``. It answers lines of JSON, in order, until its input ends.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from triptych.errors import InvalidMedia
from triptych.families.model_files import BadModel, ModelFiles
from triptych.tokens.processor_process import read_blank, written_facts, written_processed


def main(directory: str) -> None:
    # What a library prints must not be read as an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        from triptych.engine.families.item_processor import ItemProcessor

        processor = ItemProcessor(ModelFiles.load(directory))
    except (BadModel, ImportError) as error:
        reason = f"{error}; install triptych[encoder]" if isinstance(error, ImportError) else str(error)
        _write(answers, {"error": reason})
        return
    for line in sys.stdin:
        question = json.loads(line)
        if "facts" in question:
            _write(answers, written_facts(processor.facts))
            continue
        try:
            _write(answers, written_processed(processor.processed(read_blank(question))))
        except InvalidMedia as error:
            _write(answers, {"error": str(error)})


def _write(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(str(Path(sys.argv[1])))
