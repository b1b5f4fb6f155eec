from triptych.domain.embedding import DType, TensorSpec, slot_nbytes


def test_an_embedding_takes_whole_cache_lines_with_its_generation_words() -> None:
    assert slot_nbytes((TensorSpec("embeds", DType.F32, (4, 8)),)) == 192
    assert [slot_nbytes((TensorSpec("embeds", DType.U8, (nbytes,)),)) for nbytes in (48, 49)] == [64, 128]
