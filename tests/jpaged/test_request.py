"""Seeds and states of requests, and the one writer of each field."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from jpaged.request import AdmissionState, PromptScores, SequencePrefix, derived_seed
from jpaged.sampling.sampling_params import SamplingParams

from .host_requests import new_request

PACKAGE = Path(__file__).parents[2] / "jpaged"
CREATION = "request"
MUTATORS = {"append", "clear", "extend", "insert", "pop", "remove", "update"}
OWNED = {"SequencePrefix": SequencePrefix, "AdmissionState": AdmissionState, "PromptScores": PromptScores}
"""Types of fields which their writer owns whole."""
OTHER_OBJECTS = {"self", "self.counts", "output", "args"}
"""Variables and attributes that stand for no request and no sequence, in every module."""


def request_of(seed, *, number=0, engine_seed=0, n=1, **options):
    params = SamplingParams(seed=seed, n=n)
    return new_request([1, 2, 3], number=number, params=params, engine_seed=engine_seed, num_groups=2, **options)


def test_derived_seeds_never_change():
    """The seeds are recorded, since the same command has to print the same text in every version."""
    assert derived_seed(0, 0) == 0x34EC4BE1CF10B6F
    assert derived_seed(7, 123456) == 0x29DB2793BABBC8ED


def test_derived_seeds_differ_by_engine_seed_and_by_number():
    seeds = {derived_seed(engine_seed, number) for engine_seed in (-1, 0, 1, 2**63 - 1) for number in range(1000)}
    assert len(seeds) == 4000
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert len({seed >> 32 for seed in seeds}) > 3990  # Both words differ: 4,000 draws of 2³² collide in < 0.01.
    assert len({seed % 2**32 for seed in seeds}) > 3990


def test_a_request_with_a_seed_draws_the_same_whatever_its_number_and_engine():
    assert {request_of(42, number=number, engine_seed=3 * number).seed for number in range(5)} == {42}


def test_a_request_without_a_seed_draws_from_its_number_and_the_engine():
    assert request_of(None, number=5, engine_seed=3).seed == derived_seed(3, 5)
    assert request_of(0, number=5).seed == 0  # A seed of 0 is a seed.


@pytest.mark.parametrize(("seed", "bits"), [(-2, 2**64 - 2), (-(2**63), 2**63), (2**63 - 1, 2**63 - 1)])
def test_negative_seeds_are_twos_complement(seed, bits):
    assert request_of(seed).seed == bits


def declared_writers():
    """Return field of Request or SampleSequence → the modules that comments in request.py name as its writer.

    The fields of a type that such a field has belong to the same writer.
    """
    writers, writer = {}, None
    for line in (PACKAGE / "request.py").read_text().splitlines():
        if found := re.fullmatch(r"    # (?:Written by ([\w/]+)|Fixed at creation)\.", line):
            writer = found[1] or CREATION
        elif line.startswith("class "):
            writer = None
        elif writer and (found := re.match(r"    (\w+): (\w+)", line)):
            names = dataclasses.fields(OWNED[found[2]]) if found[2] in OWNED else ()
            for name in (found[1], *(field.name for field in names)):
                writers.setdefault(name, set()).add(writer)
    return writers


def written_attributes(tree):
    """Yield the names of attributes that a module assigns to or mutates, except those of other objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            target = node.func.value
        else:
            continue
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) not in OTHER_OBJECTS:
            yield target.attr


def test_each_field_of_requests_and_sequences_has_one_writer():
    writers = declared_writers()
    assert {"token_ids", "pages", "live", "order", "num_bypassed"} <= writers.keys()
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).with_suffix("").as_posix()
        for name in written_attributes(ast.parse(path.read_text())):
            assert module in writers.get(name, {module}) | {CREATION}, f"{module} writes the field {name}"
