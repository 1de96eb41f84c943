"""A bucket as matrices: blocks and the rest cover it exactly, and nothing is copied."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.hooks.matrices import Block, Cut, as_one, by_parameter
from tests.hooks.world import bucket_of

shapes = st.lists(st.lists(st.integers(1, 9), max_size=4).map(tuple), min_size=1, max_size=8)


def zeros(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {f"p{i}": torch.zeros(shape, dtype=dtype) for i, shape in enumerate(shapes)}


def is_large(block: Block) -> bool:
    return block.rows * block.columns > 3 * (block.rows + block.columns)


def covered(cut: Cut) -> list[int]:
    spans = [*cut.rest, *((block.start, block.end) for block in cut.blocks)]
    return [place for start, end in sorted(spans) for place in range(start, end)]


@given(shapes)
def test_every_number_is_in_a_block_or_in_the_rest(shapes: list[tuple[int, ...]]) -> None:
    bucket = bucket_of(zeros(*shapes))

    for take in (by_parameter, as_one):
        assert covered(take(bucket, is_large)) == list(range(bucket.flat.numel()))


def test_equal_neighbours_are_one_block_and_the_rest_is_joined() -> None:
    bucket = bucket_of(zeros((8, 9), (8, 9), (9, 8), (3,), (2, 2)))

    cut = by_parameter(bucket, is_large)

    assert cut.blocks == (Block(("p0", "p1"), 0, 8, 9), Block(("p2",), 144, 9, 8))
    assert cut.rest == ((216, 223),)
    assert cut.rest_numel == 7


def test_a_block_is_a_view_of_the_bucket() -> None:
    bucket = bucket_of(zeros((3,), (8, 9), (8, 9)))
    cut = by_parameter(bucket, is_large)

    cut.blocks[0].of(bucket.flat)[1].fill_(1)

    assert [view.sum().item() for view in bucket.gradients()] == [0, 0, 72]


def test_rows_are_what_lies_outermost_in_memory() -> None:
    image = torch.zeros(16, 3, 5, 5).to(memory_format=torch.channels_last)
    turned = torch.zeros(20, 30).t()

    cut = by_parameter(bucket_of({"image": image, "turned": turned}), is_large)

    assert [(block.rows, block.columns) for block in cut.blocks] == [(16, 75), (20, 30)]


def test_complex_numbers_are_left_alone() -> None:
    bucket = bucket_of(zeros((30, 30), dtype=torch.complex64))

    assert by_parameter(bucket, is_large) == Cut((), ((0, 900),))


def test_a_bucket_as_one_matrix_is_nearly_square_and_named_after_its_parameters() -> None:
    one, same, other = (bucket_of({name: torch.zeros(110)}) for name in ("a", "a", "b"))

    cut = as_one(one, is_large)

    assert [(block.rows, block.columns) for block in cut.blocks] == [(10, 11)]
    assert cut.rest == ()
    assert as_one(same, is_large).blocks[0].keys == cut.blocks[0].keys
    assert as_one(other, is_large).blocks[0].keys != cut.blocks[0].keys
