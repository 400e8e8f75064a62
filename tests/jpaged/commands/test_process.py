"""What commands do to their own process."""

import gc

from jpaged.commands.process import garbage_uncollected


def test_what_imports_have_made_is_left_out_of_later_searches_for_garbage():
    was_enabled = gc.isenabled()
    try:
        with garbage_uncollected():
            assert not gc.isenabled()
            made: list[list[int]] = [[]]
        assert gc.isenabled() is was_enabled
        assert not any(tracked is made for tracked in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(tracked is made for tracked in gc.get_objects())
