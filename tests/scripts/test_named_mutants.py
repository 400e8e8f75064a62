"""scripts/named_mutants.py tells a killed mutant from one that survives, and refuses one that no longer applies."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOY = """
stages = ["test_toy.py"]
mutant = [
  { name = "seen", file = "toy.py", old = "a + b", new = "a - b" },
  { name = "unseen", file = "toy.py", old = "a + b", new = "b + a" },
]
"""


@pytest.mark.parametrize("suite", sorted((ROOT / "tests/mutants").glob("*.toml")), ids=lambda path: path.stem)
def test_every_mutant_applies_to_the_code_as_it_is(suite, script):
    for mutant in tomllib.loads(suite.read_text())["mutant"]:
        assert script("named_mutants").mutated(ROOT, mutant)


def test_a_mutant_that_survives_is_a_fault_and_a_stale_one_an_error(tmp_path, script, capsys):
    (tmp_path / "tests" / "mutants").mkdir(parents=True)
    (tmp_path / "tests" / "mutants" / "toy.toml").write_text(TOY)
    (tmp_path / "toy.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_toy.py").write_text("import toy\n\ndef test_sum():\n    assert toy.add(1, 2) == 3\n")
    (tmp_path / "conftest.py").write_text("import hypothesis\nhypothesis.settings.register_profile('first_failure')\n")
    named_mutants = script("named_mutants")
    assert named_mutants.run_suite(tmp_path, "toy") == 1
    printed = capsys.readouterr().out
    assert "\ntoy: seen: killed by FAILED test_toy.py::test_sum" in printed
    assert "\nFAULT: toy: unseen: passes" in printed
    (tmp_path / "toy.py").write_text("def add(*numbers):\n    return sum(numbers)\n")
    with pytest.raises(named_mutants.SuiteError, match=r"seen: its old text stands 0 times in toy\.py"):
        named_mutants.run_suite(tmp_path, "toy")
