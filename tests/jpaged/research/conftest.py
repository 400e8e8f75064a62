"""What engines draw that start with the old and with the new weights, for the tests of this folder."""

import pytest

from jpaged import Engine

from ..tiny_model import SIZES
from .trainer_requests import NEW, OLD, PARAMS, PROMPTS, tokens


@pytest.fixture(scope="module")
def drawn(tiny: str, shared_executables: None, few_buckets: None) -> dict[str, list[tuple[int, ...]]]:
    """Give the tokens of every request, by the name of the weights."""
    found = {}
    for name, tree in (("old", OLD), ("new", NEW)):
        with Engine(tiny, params=tree, **SIZES) as engine:
            found[name] = tokens(engine.generate(PROMPTS, PARAMS))
    assert found["old"] != found["new"]
    return found
