from triptych.domain.embedding_hints import MAX_HINTS, EmbeddingHints, hint_of
from triptych.domain.item_plan import Content
from triptych.machine.arena.published import HintReader, PublishedContents

CAT, DOG, FOX = ((name, b"") for name in (b"cat", b"dog", b"fox"))


def hints(*contents: Content) -> tuple[bytes, ...]:
    return tuple(map(hint_of, contents))


def numbered(number: int) -> Content:
    return (b"%d" % number, b"")


def told(reader: HintReader) -> list[EmbeddingHints]:
    """Tell all that there is to tell."""
    reports = []
    while (report := reader.report()) is not None:
        reports.append(report)
    assert not reader.is_behind()
    return reports


def test_changes_are_told_once_with_the_state_that_holds_when_they_are_sent() -> None:
    published = PublishedContents(limit=10)
    reader = published.reader()
    assert told(reader) == [EmbeddingHints(1)], "that it publishes is worth a report"
    published.encoding(b"cat", CAT)
    published.encoding(b"dog", DOG)
    assert reader.is_behind()
    assert told(reader) == [EmbeddingHints(2, encoding=hints(CAT, DOG))]
    published.encoding_ended(b"cat", held=True)
    published.encoding_ended(b"dog", held=False)
    published.encoding(b"fox", FOX)
    published.encoding_ended(b"fox", held=True)
    assert told(reader) == [EmbeddingHints(3, held=hints(CAT, FOX), dropped=hints(DOG))]
    published.held(b"cat", CAT)
    assert told(reader) == []
    published.gone(b"cat")
    assert told(reader) == [EmbeddingHints(4, dropped=hints(CAT))]
    published.validate()


def test_segments_are_told_by_their_keys() -> None:
    published = PublishedContents(limit=2)
    keys = [bytes([number]) * 32 for number in range(3)]
    for key in (*keys, keys[1]):
        published.segment(key)
    published.gone(keys[2])
    (report,) = told(published.reader())
    assert report.held == (keys[1][:16],)
    published.validate()


def test_a_new_reader_starts_with_what_there_is_in_bounded_reports() -> None:
    published = PublishedContents(limit=2000)
    for number in range(MAX_HINTS + 10):
        published.held(b"%d" % number, numbered(number))
    published.gone(b"0")
    reader = published.reader()
    first = reader.report()
    assert first is not None
    published.gone(b"1")
    (second,) = told(reader)
    assert (first.sequence, len(first.held), first.dropped) == (1, MAX_HINTS, ())
    assert (second.sequence, len(second.held), second.dropped) == (2, 9, hints(numbered(1)))


def test_a_reader_that_falls_behind_starts_over() -> None:
    published = PublishedContents(limit=2000)
    reader = published.reader()
    told(reader)
    for turn in range(10 * MAX_HINTS):
        published.held(b"%d" % (turn % 4), numbered(turn % 4))
        published.gone(b"%d" % (turn % 4))
    published.held(b"cat", CAT)
    assert told(reader) == [EmbeddingHints(1, held=hints(CAT))]


def test_those_used_longest_ago_are_no_longer_published() -> None:
    published = PublishedContents(limit=2)
    reader = published.reader()
    for key, content in ((b"cat", CAT), (b"dog", DOG), (b"cat", CAT), (b"fox", FOX)):
        published.held(key, content)
    assert told(reader) == [EmbeddingHints(1, held=hints(CAT, FOX))]
    published.encoding_ended(b"dog", held=True)
    published.gone(b"dog")
    assert told(reader) == []
    published.held(b"dog", DOG)
    assert told(reader) == [EmbeddingHints(2, held=hints(DOG), dropped=hints(CAT))]
    assert len(published) == 2
    published.validate()


def test_nothing_is_published_without_a_limit() -> None:
    published = PublishedContents(limit=0)
    reader = published.reader()
    published.encoding(b"cat", CAT)
    published.encoding_ended(b"cat", held=True)
    published.held(b"cat", CAT)
    assert told(reader) == []
    assert len(published) == 0
