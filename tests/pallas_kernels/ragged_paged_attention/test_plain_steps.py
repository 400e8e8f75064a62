"""Steps made of lists of lengths are those that an independent twin makes, token by token."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels.ragged_paged_attention.interface import NULL_PAGE
from jpaged.pallas_kernels.ragged_paged_attention.plain_steps import random_tables, step_of_rows
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend

from ...paged_steps import metadata

rows = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(rows=rows, page_size=st.sampled_from([4, 16]), spare_tokens=st.integers(0, 9), spare_rows=st.integers(0, 3))
def test_a_step_is_that_of_the_twin(rows, page_size, spare_tokens, spare_rows):
    rows = sorted(rows, key=lambda row: row[0] > 1)
    query_lens = [queries for queries, _ in rows]
    context_lens = [queries + before for queries, before in rows]
    tables = random_tables(context_lens, page_size, np.random.default_rng(len(rows)))
    sizes = {"page_size": page_size, "num_tokens": sum(query_lens) + spare_tokens, "num_rows": len(rows) + spare_rows}
    ours = step_of_rows(XlaBackend(), query_lens, context_lens, tables, **sizes)
    lists = [[int(page) for page in table if page != NULL_PAGE] for table in tables]
    twin = metadata(XlaBackend(), query_lens, context_lens, [lists], table_len=tables.shape[1], **sizes)
    for name, mine, its in zip(
        [str(path) for path, _ in jax.tree_util.tree_leaves_with_path(ours)],
        jax.tree.leaves(ours),
        jax.tree.leaves(twin),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, its, err_msg=name)
        assert mine.dtype == its.dtype, name


def test_rows_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"query_lens: got \[3, 1\], rows with one query come first"):
        step_of_rows(
            XlaBackend(), [3, 1], [3, 1], np.array([[1], [2]], np.int32), page_size=4, num_tokens=4, num_rows=2
        )


def test_tables_in_random_order_share_no_page():
    tables = random_tables([9, 1, 4], 4, np.random.default_rng(0), first_page=5)
    assert (tables == NULL_PAGE).tolist() == [[False, False, False], [False, True, True], [False, True, True]]
    assert sorted(tables[tables != NULL_PAGE].tolist()) == [5, 6, 7, 8, 9]
