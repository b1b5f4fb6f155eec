import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console, RenderableType
from rich.table import Table

from triptych.cli import show

ITEM = {
    "item": 0,
    "modality": "image",
    "width": 56,
    "height": 56,
    "tokens": 16,
    "encoder": "encoder-1",
    "encode_attempts": 1,
    "encoder_cached": False,
    "queue_s": 0.002,
    "encode_s": 0.03,
    "pull_backend": "shm",
    "pull_bytes": 4096,
    "pull_s": 0.001,
    "text_cached": False,
}
CACHED = {**ITEM, "item": 1, "encoder": "encoder-2", "encoder_cached": True, "queue_s": 0.0, "encode_s": 0.0}
HELD = {**CACHED, "item": 2, "text_cached": True, "pull_bytes": 0, "pull_s": 0.0, "pull_backend": ""}
STAGES = ("prepare", "encode", "pull", "queue", "prefill", "decode")


def document(*items: dict[str, Any], **durations: float) -> dict[str, Any]:
    took = dict.fromkeys([f"{stage}_s" for stage in STAGES], 0.01)
    return {"items": list(items), "text_instance": "text-1", "ttft_s": 0.06, "total_s": 0.08, **took, **durations}


def seen(part: RenderableType, width: int = 200) -> list[str]:
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(part)
    return out.getvalue().splitlines()


def test_an_item_without_encode_or_pull_has_no_such_times() -> None:
    header, encoded, cached, held, _ = seen(show.timeline(document(ITEM, CACHED, HELD)))
    assert "decode, wait" in header
    assert encoded.split() == [
        "image",
        "1",
        "56x56",
        "16",
        "encoder-1",
        "2.0",
        "ms",
        "30.0",
        "ms",
        "shm",
        "4,096",
        "1.0",
        "ms",
    ]
    assert cached.split() == ["image", "2", "56x56", "16", "encoder-2", "-", "cached", "shm", "4,096", "1.0", "ms"]
    assert held.split() == ["image", "3", "56x56", "16", "encoder-2", "-", "cached", "cached", "-", "-"]


def test_an_item_without_a_size_is_shown() -> None:
    _, row, _ = seen(show.timeline(document({**ITEM, "modality": "audio", "width": 0, "height": 0})))
    assert row.split()[:4] == ["audio", "1", "-", "16"]


def test_an_item_that_a_second_encoder_answered_first_is_marked() -> None:
    _, row, _ = seen(show.timeline(document({**ITEM, "hedges": 1, "hedge_won": True})))
    assert "encoder-1 (hedged)" in row


def test_line_and_bars_have_the_same_stages_in_the_same_order() -> None:
    *_, line = seen(show.timeline(document(ITEM)))
    assert tuple(re.findall(r"(\w+) 10\.0 ms", line)) == STAGES
    assert "= 80.0 ms with the calls between them; first token after 60.0 ms, on text-1" in line
    handed = document(ITEM) | {"prefill_instance": "prefill-1", "kv_transfer_s": 0.02}
    *_, line = seen(show.timeline(handed), width=300)
    assert "first token after 60.0 ms, on prefill-1, transferred to text-1 in 20.0 ms" in line
    bars = [row.split()[0] for row in seen(show.bars(document(ITEM))) if not row.startswith(" ")]
    assert tuple(bars) == STAGES


def test_a_skipped_stage_is_not_shown() -> None:
    of_text = document(encode_s=0.0, pull_s=0.0)
    (line,) = seen(show.timeline(of_text))
    assert "encode" not in line
    assert [row.split()[0] for row in seen(show.bars(of_text))] == ["prepare", "queue", "prefill", "decode"]


def test_bars_mark_items_that_were_encoded_before() -> None:
    rows = seen(show.bars(document(ITEM, CACHED, encode_s=0.04)))
    encode, first, second = rows[1:4]
    assert "until the last item had its embedding" in encode
    assert first.split()[:2] == ["image", "1"]
    assert "30.0 ms" in first
    assert re.fullmatch(r" +image 2 +cached +encoder-2 *", second)
    asked = seen(show.bars(document(CACHED, HELD, encode_s=0.005)))[1]
    assert re.search(r"5\.0 ms +asking: everything was encoded before", asked)


def test_an_image_is_drawn_within_its_stage() -> None:
    """The item's times come from another clock than the stage's."""
    late = {**ITEM, "queue_s": 0.9, "encode_s": 0.03}
    stage, image = seen(show.bars(document(late, encode_s=0.04, total_s=0.1)))[1:3]
    assert len(image.split("30.0 ms")[0].rstrip()) <= len(stage.split("40.0 ms")[0].rstrip())


def test_many_images_are_summed_up() -> None:
    rows = seen(show.bars(document(*({**ITEM, "item": number} for number in range(20)))))
    assert sum("image " in row and "ms" in row for row in rows) == 16
    assert any("and 4 more" in row for row in rows)


def test_each_shard_of_an_item_has_its_own_line() -> None:
    parts = [{**ITEM, "modality": "video", "shard": shard} for shard in ("1-2/4", "3-4/4")]
    _, first, second, _ = seen(show.timeline(document(*parts)))
    assert first.startswith("video 1 1-2/4")
    assert second.startswith("video 1 3-4/4")


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_bars_fit_the_terminal_without_truncated_names_or_times(width: int) -> None:
    asked = document({**ITEM, "encode_s": 12.3456}, CACHED, encode_s=23.4567, total_s=24.0)
    rows = seen(show.bars(asked), width)
    assert all(len(row) <= width for row in rows)
    begun = [row for row in rows if row[:3].strip()]
    assert [row.split()[0] for row in begun] == ["prepare", "encode", "image", "image", *STAGES[2:]]
    assert [match[0] for row in begun if (match := re.search(r"[\d.]+ ms|cached", row))] == [
        *("10.0 ms", "23456.7 ms", "12345.6 ms", "cached"),
        *["10.0 ms"] * 4,
    ]
    assert sum("\u2588" in row for row in begun) >= 2, "there are bars"
    assert len(rows) <= 3 * len(begun), "explanations take few lines"
    assert any("router: check" in row for row in rows) == (width >= 70)


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_items_fit_the_terminal_without_truncated_names_or_times(width: int) -> None:
    rows = seen(show.timeline(document({**ITEM, "encode_s": 12.3456, "pull_bytes": 12_345_678}, CACHED)), width)
    assert all(len(row) <= width for row in rows)
    (first,) = (row for row in rows if row.startswith("image 1"))
    for said in ("encoder-1", "2.0 ms", "12345.6 ms", "1.0 ms"):
        assert said in first


def test_an_answer_that_went_on_elsewhere_says_so() -> None:
    *_, line = seen(show.timeline({**document(ITEM), "continuations": 1, "interrupted_s": 0.025}), 300)
    assert "on text-1 after another was lost, with a pause of 25.0 ms" in line


def test_an_answer_that_was_preempted_says_so() -> None:
    *_, line = seen(show.timeline({**document(ITEM), "preemptions": 2, "preempted_s": 0.025}), 300)
    assert "on text-1, preempted for 25.0 ms" in line


def test_control_characters_of_others_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console = show.plain_console()
    table = Table("name\x1b]0;title\x07")
    table.add_row("encoder\x1b[2J-1\x9b")
    console.print("two\x1b[31m\r\nlines", soft_wrap=True)
    console.print(table)
    shown = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert shown.startswith("two[31m\nlines\n")
