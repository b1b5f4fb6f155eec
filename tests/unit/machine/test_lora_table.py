import pytest

from triptych.domain.lora import LoadedLora, LoraLimits
from triptych.errors import InvalidRequest, ModelNotFound
from triptych.machine.lora_table import LoraTable


def lora(name: str, digest: str = "", nbytes: int = 10) -> LoadedLora:
    return LoadedLora(name, digest or name, 8, nbytes)


def table(**limits: int) -> LoraTable:
    return LoraTable(LoraLimits(**limits), "base")


@pytest.mark.parametrize("name", ["", "a b", "-a", "a" * 129, "é", "a\n"])
def test_names_have_usual_characters(name: str) -> None:
    with pytest.raises(InvalidRequest, match="name has 1 to 128"):
        table().add(lora(name))


def test_names_and_files_are_unique_and_the_bases_name_is_taken() -> None:
    known = table()
    known.add(lora("b"))
    known.add(lora("a"))
    assert [entry.name for entry in known.loaded] == ["a", "b"]
    with pytest.raises(InvalidRequest, match="loaded already"):
        known.add(lora("a", "other"))
    with pytest.raises(InvalidRequest, match="the same LoRA adapter is loaded as 'a'"):
        known.add(lora("c", "a"))
    with pytest.raises(InvalidRequest, match="name of the base model"):
        known.add(lora("base"))


def test_number_and_memory_are_bounded_and_what_leaves_counts_for_memory_until_it_is_forgotten() -> None:
    known = table(max_loras=2, max_lora_bytes=25)
    known.add(lora("a"))
    known.add(lora("b"))
    with pytest.raises(InvalidRequest, match="2 LoRA adapters are loaded"):
        known.check_name("c")
    assert known.leave("a") == lora("a")
    assert (known.takes("a"), known.is_leaving("a")) == (False, True)
    with pytest.raises(InvalidRequest, match="takes 10 bytes, others take 20"):
        known.add(lora("c"))
    known.forget("a")
    known.add(lora("c"))


def test_an_adapter_that_leaves_may_come_back() -> None:
    known = table()
    known.add(lora("a"))
    known.leave("a")
    with pytest.raises(ModelNotFound):
        known.leave("a")
    known.add(lora("again", "a"))
    assert (known.takes("a"), known.is_leaving("a")) == (True, False)
