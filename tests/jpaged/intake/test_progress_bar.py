"""Where the progress bar of offline calls is shown."""

import sys
from types import ModuleType

from jpaged.intake.offline import progress_bar


def test_a_bar_is_shown_in_a_notebook_and_not_in_a_pipe(monkeypatch):
    """The kernel of a notebook is told by its package: stderr is no terminal there either."""
    for is_notebook in (False, True):
        if is_notebook:
            monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
        for is_shown in (False, True):
            with progress_bar(3, is_shown=is_shown) as bar:
                assert bar.disable is not (is_notebook and is_shown)
