"""Where the progress bar of offline calls is shown."""

import sys
import threading
from types import ModuleType

from tqdm import tqdm

from jpaged.intake.progress_bar import progress_bar


def test_a_bar_is_shown_in_a_notebook_and_not_in_a_pipe(monkeypatch):
    """The kernel of a notebook is told by its package: stderr is no terminal there either."""
    for is_notebook in (False, True):
        if is_notebook:
            monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
        for is_shown in (False, True):
            with progress_bar(3, is_shown=is_shown) as bar:
                assert bar.disable is not (is_notebook and is_shown)


def test_a_bar_waits_for_no_lock_that_an_interrupt_left_taken(monkeypatch):
    """Not for the lock of tqdm's other bars, and not for that of a bar that was interrupted as it was drawn."""
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    ended = []

    def show():
        with progress_bar(1, is_shown=True) as bar:
            bar.update()
        ended.append(bar)

    with progress_bar(1, is_shown=True) as interrupted, tqdm.get_lock(), interrupted._lock:
        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        thread.join(30)
    assert len(ended) == 1
