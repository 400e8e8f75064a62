"""The items of `gpu_check` and `tpu_check`, in the order in which they run, and the goals that both have."""

from __future__ import annotations

from collections.abc import Mapping

from . import engine_check, kernel_items
from .experts_check import experts_item
from .items import Item
from .kernel_items import Rival
from .scoring_check import scoring_item
from .step_profile import profile_item

GOALS = {**kernel_items.GOALS, **engine_check.GOALS}


def all_items(rival: Rival, environment: Mapping[str, str], *, has_command_buffers: bool) -> list[Item]:
    """Return every item. `environment` and `has_command_buffers` are those of `engine_items`.

    A cheap item of each kind comes first: a run that is ended early has told most of what matters.
    """
    correctness, *measured = kernel_items.kernel_items()
    small, *engine = engine_check.engine_items(environment, has_command_buffers=has_command_buffers)
    compared = kernel_items.compared_items(rival)
    experts, step, scores = experts_item(), profile_item(), scoring_item(environment)
    return [correctness, small, experts, *measured, *compared, step, *engine, scores]
