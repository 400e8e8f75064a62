"""The mutation harness itself: every kind of mutant is what its name says, and a run tells killed from surviving."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutants_of = load("mutations").mutants_of


def changes(source, kind=None):
    return {(m.original, m.mutated) for m in mutants_of(source, "toy.py") if kind in (None, m.kind)}


KINDS = {
    "comparison": (
        "a < b\nc <= d\ne == f\ng is h\ni in j",
        {"a < b": "a <= b", "c <= d": "c < d", "e == f": "e != f", "g is h": "g is not h", "i in j": "i not in j"},
    ),
    "plus minus": ("x = a + b\nx -= c", {"x = a + b": "x = a - b", "x -= c": "x += c"}),
    "rounding": ("x = a // b", {"x = a // b": "x = -(-a // b)"}),
    "min max": ("x = min(a, b)\ny = max(a, b)", {"x = min(a, b)": "x = max(a, b)", "y = max(a, b)": "y = min(a, b)"}),
    "boolean": ("x = True", {"x = True": "x = False"}),
    "dropped call": ("f(a)", {"f(a)": "pass"}),
    "swapped arguments": ("x = f(a, b, c=d)", {"x = f(a, b, c=d)": "x = f(b, a, c=d)"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_does_what_its_name_says(kind):
    source, expected = KINDS[kind]
    assert changes(source, kind) == set(expected.items())


SEVERAL = {
    "one off: a constant": ("one off", "x = 3", {"x = 4", "x = 2"}),
    "one off: a slice": ("one off", "x = a[b:]", {"x = a[b + 1:]", "x = a[b - 1:]"}),
    "one off: a range": ("one off", "x = range(a)", {"x = range(a + 1)", "x = range(a - 1)"}),
    "one off: a sum, once": ("one off", "x = a + b - c", {"x = a + b - c + 1", "x = a + b - c - 1"}),
    "one off: a sum with a constant": ("one off", "x = a + 1", {"x = a + 2", "x = a + 0"}),
    "one off: a page count": (
        "one off",
        "x = a // b",
        {"x = a // b + 1", "x = a // b - 1", "x = (a + 1) // b", "x = (a - 1) // b"}
        | {"x = a // (b + 1)", "x = a // (b - 1)"},
    ),
    "removed guard: if": ("removed guard", "if a:\n    f()", {"if True:", "if False:"}),
    "removed guard: while": ("removed guard", "while a:\n    f()", {"while False:"}),
    "removed guard: and": ("removed guard", "x = a and b and c", {"x = b and c", "x = a and c", "x = a and b"}),
    "removed guard: not": ("removed guard", "x = not a", {"x = a"}),
    "removed guard: a comprehension": ("removed guard", "x = [a for a in b if c]", {"x = [a for a in b if True]"}),
    "removed guard: break": (
        "removed guard",
        "for a in b:\n    if a:\n        f()\n        break",
        {"if True:", "if False:", "pass"},
    ),
}


@pytest.mark.parametrize(("kind", "source", "expected"), SEVERAL.values(), ids=SEVERAL.keys())
def test_a_kind_with_several_changes(kind, source, expected):
    assert {mutated for _, mutated in changes(source, kind)} == expected


def test_dropping_the_only_assignment_of_a_name_is_no_mutant():
    """It is a NameError, which raises the kill rate and proves nothing."""
    source = "def f(a):\n    x = a\n    y = 0\n    y = x\n    y += 1\n    a.b = 0\n    del a.c\n    return y"
    dropped = {"y = 0", "y = x", "y += 1", "a.b = 0", "del a.c"}
    assert changes(source, "dropped assignment") == {(statement, "pass") for statement in dropped}


LEFT_ALONE = '''
"""Module 1."""
import enum
if TYPE_CHECKING:
    import one
@decorated(slots=True, number=1)
class A:
    """Class 1."""
    def check(self):
        assert self.a < 1, 1
    def _check_more(self):
        for x in range(3):
            self.f(x)
    def __repr__(self):
        return self.a + 1
    def f(self, a: tuple[int, 1]) -> list[1]:
        b: tuple[int, 2]
        raise ValueError(f"{a + 1} is too much", 2)
    def g(self, a):
        assert a, f"{a + 1}"
        return zip(*a, strict=True)
'''


def test_what_decides_nothing_is_left_alone():
    assert changes(LEFT_ALONE) == set()


SOURCE = """
def pages(tokens, size):
    if tokens > 5:
        return -(-tokens // size)
    count = 0
    count += 1
    count += 1
    return count
"""


def test_a_key_outlives_new_lines_and_tells_equal_lines_apart():
    before, after = mutants_of(SOURCE, "toy.py"), mutants_of("import os\n\n\nX = None" + SOURCE, "toy.py")
    assert [mutant.key for mutant in before] == [mutant.key for mutant in after]
    assert all(m.line + 3 == n.line and m.id != n.id for m, n in zip(before, after, strict=True))
    for name in ("id", "key"):
        assert len({getattr(mutant, name) for mutant in before}) == len(before)


def test_a_mutant_compiles_to_its_one_change_and_leaves_the_tree_as_it_was():
    mutants = mutants_of(SOURCE, "toy.py")
    unchanged = ast.dump(mutants[0].tree)
    values = set()
    for mutant in mutants:
        namespace = {}
        exec(mutant.compile("toy.py"), namespace)
        assert ast.dump(mutant.tree) == unchanged
        if mutant.original == "if tokens > 5:":
            values.add((mutant.mutated, tuple(namespace["pages"](tokens, 4) for tokens in (4, 5, 6))))
    assert values == {
        ("if True:", (1, 2, 2)),
        ("if False:", (2, 2, 2)),
        ("if tokens >= 5:", (2, 2, 2)),
        ("if tokens > 6:", (2, 2, 2)),
        ("if tokens > 4:", (2, 2, 2)),
    }


TOY = """
from .other import below

def countdown(number):
    total = 0
    while number:
        total += number
        number = below(number)
    return total

def is_large(number):
    if number >= 1000:
        return True
    return False
"""
TESTS = """
from toy.toy import is_large

def test_large():
    print("spoken")
    assert is_large(2000) and not is_large(500)
"""
SEEDS = "from toy.toy import countdown\n\ndef seed(number):\n    assert countdown(number) == sum(range(number + 1))\n"
STAGES = ["toy.seeds:seed@0-3", "test_toy.py"]
SURVIVORS = {
    ("if number >= 1000:", "if number > 1000:"),
    ("if number >= 1000:", "if number >= 1001:"),
    ("if number >= 1000:", "if number >= 999:"),
}


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "src").mkdir()
    files = {"__init__": "", "other": "def below(number):\n    return number - 1\n", "toy": TOY, "seeds": SEEDS}
    for name, text in files.items():
        (tmp_path / "src" / f"{name}.py").write_text(text)
    (tmp_path / "test_toy.py").write_text(TESTS)
    # As in our own checkout: a folder imports under another name than its own.
    (tmp_path / "pyproject.toml").write_text('[tool.setuptools.package-dir]\n"toy" = "src"\n')
    (tmp_path / "toy.py").write_text(f"__path__ = [{str(tmp_path / 'src')!r}]\n")
    folder = tmp_path / "tests" / "mutants"
    folder.mkdir(parents=True)
    suite = {"files": ["src/toy.py"], "tests": STAGES, "libraries": ["pytest"]}
    (folder / "suite.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in suite.items()))
    return tmp_path


def mutate(checkout, *options):
    command = [sys.executable, SCRIPTS / "mutate.py", "--root", checkout, "--output", checkout / "out.json", *options]
    # A plugin that happens to be installed costs each mutant its import.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=checkout, env=environment, timeout=100
    )
    path = checkout / "out.json"
    return result, json.loads(path.read_text()) if path.is_file() else None


def test_a_run_tells_the_killed_the_hanging_and_the_survivors(checkout):
    result, summary = mutate(checkout, "--check")
    assert result.returncode == 1, result.stderr
    survivors = summary["survivors"]["unargued"]
    assert {(entry["original"], entry["mutated"]) for entry in survivors} == SURVIVORS
    assert all(f"FAULT survives unargued: {entry['id']}" in result.stdout for entry in survivors)
    assert summary["killed"] == summary["mutants"] - len(SURVIVORS)
    assert [stage["stage"] for stage in summary["stages"]] == STAGES
    assert all(stage["kills"] > 0 for stage in summary["stages"])
    # Counting down without a step never ends. What bounds it is processor time, not the minute that a wait may take.
    assert summary["stages"][0]["kills_by_time"] == 1
    assert summary["stages"][0]["seconds_in_killed"] < 40
    assert summary["files"]["src/toy.py"]["mutants"] == summary["mutants"] == len(mutants_of(TOY, "src/toy.py"))


def test_a_mutant_that_only_waits_is_killed_too(checkout):
    (checkout / "src" / "toy.py").write_text("def is_small(number):\n    return number < 1000\n")
    seeds = "import time\nfrom toy.toy import is_small\n\ndef seed(number):\n    is_small(1000) and time.sleep(1000)\n"
    (checkout / "src" / "seeds.py").write_text(seeds)
    _, summary = mutate(checkout, "src/toy.py", "--tests", "toy.seeds:seed@0-0", "--limit", 3)
    assert [stage["kills_by_time"] for stage in summary["stages"]] == [summary["killed"]] == [2]


def test_an_argued_survivor_is_no_fault_and_an_argument_without_one_is(checkout):
    (checkout / "src" / "toy.py").write_text("def is_large(number):\n    return number > 1000\n")
    keys = [m.key for m in mutants_of((checkout / "src" / "toy.py").read_text(), "src/toy.py")]
    names = ("file", "function", "kind", "original", "mutated", "ordinal")
    text = ""
    for key in keys:
        fields = {**dict(zip(names, key, strict=True)), "why": "a toy"}
        text += "[[survivor]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())
    path = checkout / "tests" / "mutants" / "survivors.toml"
    path.write_text(text)
    # Among the tests only the one that never looks at 1000.
    stages = ["--tests", "test_toy.py"]
    _, summary = mutate(checkout, *stages)
    assert len(summary["survivors"]["argued"]) == len(keys) == 3
    assert not summary["survivors"]["unargued"]
    path.write_text(path.read_text().replace("is_large", "is_small", 1))
    result, summary = mutate(checkout, *stages, "--check")
    assert len(summary["survivors"]["unargued"]) == 1
    assert "FAULT argued for, and no survivor: src/toy.py | is_small" in result.stdout


NAMED = """
[[mutant]]
name = "large is small"
file = "src/toy.py"
expect = "killed"
old = "return True"
new = "return False"

[[mutant]]
name = "said otherwise"
file = "src/toy.py"
expect = "passes"
old = "number >= 1000"
new = "not number < 1000"
"""


def test_named_mutants_are_held_to_what_is_expected_of_them(checkout):
    path = checkout / "tests" / "mutants" / "named.toml"
    path.write_text(NAMED)
    result, summary = mutate(checkout, "--named", "--check")
    assert result.returncode == 0, result.stdout + result.stderr
    assert [(entry["name"], entry["got"]) for entry in summary["named"]] == [
        ("large is small", "killed"),
        ("said otherwise", "passes"),
    ]
    _, summary = mutate(checkout, "--named", "--only", "1")
    assert [entry["name"] for entry in summary["named"]] == ["large is small"]
    path.write_text(NAMED.replace('"killed"', '"?"').replace('"passes"', '"killed"').replace('"?"', '"passes"'))
    result, _ = mutate(checkout, "--named", "--check")
    assert result.returncode == 1
    assert "FAULT named: large is small killed" in result.stdout
    assert "FAULT named: said otherwise passes" in result.stdout


@pytest.mark.parametrize("old", ["return Nothing", "number"], ids=["nowhere", "several times"])
def test_a_named_mutant_that_does_not_apply_is_an_error(checkout, old):
    text = NAMED.replace("return True", old)
    (checkout / "tests" / "mutants" / "named.toml").write_text(text)
    result, _ = mutate(checkout, "--named")
    assert result.returncode == 1
    assert "large is small: its old text is" in result.stderr


def test_a_suite_that_proves_nothing_is_an_error(checkout):
    result, summary = mutate(checkout, "src/toy.py", "--tests", "toy.seeds:seed@0-3", "--tests", "test_none.py")
    assert (result.returncode, summary) == (1, None)
    assert "the unchanged code fails in test_none.py: pytest exits with 4" in result.stderr
    (checkout / "src" / "nobody.py").write_text("X = 1\n")
    result, summary = mutate(checkout, "src/toy.py", "src/nobody.py", "--tests", "test_toy.py")
    assert (result.returncode, summary) == (1, None)
    assert "the stages never import src/nobody.py" in result.stderr


def test_a_stopped_run_goes_on_where_it_was(checkout):
    """What is done is not run again: a fate changed by hand in the progress file stands in the report."""
    progress, hold = checkout / "out.progress.jsonl", checkout / "hold"
    held = "\nimport os, time\ndef held(number):\n    while os.path.exists('hold'):\n        time.sleep(0.01)\n"
    (checkout / "src" / "seeds.py").write_text(SEEDS + held)
    stages = ["--tests", "toy.seeds:seed@0-3", "--tests", "toy.seeds:held@0-0"]
    command = [sys.executable, SCRIPTS / "mutate.py", "--root", checkout, "--output", checkout / "out.json", *stages]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert b"unchanged" in process.stdout.readline()
        hold.touch()  # Whoever survives the first stage stays in the second.
        while not progress.is_file() or len(progress.read_text().splitlines()) < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    hold.unlink()
    about, *lines = progress.read_text().splitlines()
    done = [json.loads(line) for line in lines]
    done[0]["stage"] = None
    progress.write_text("\n".join([about, *map(json.dumps, done)]) + "\n")
    _, summary = mutate(checkout, "--resume", *stages)
    survivors = {entry["id"]: entry["function"] for entry in summary["survivors"]["unargued"]}
    assert survivors.pop(done[0]["id"]) == "countdown"
    assert set(survivors.values()) == {"is_large"}
    assert not progress.is_file()
    progress.write_text(about.replace("seed@0-3", "seed@0-4") + "\n")
    result, _ = mutate(checkout, "--resume", *stages)
    assert "other stages" in result.stderr
    # Of a file that has changed nothing is kept.
    progress.write_text("\n".join([about, *map(json.dumps, done)]) + "\n")
    (checkout / "src" / "toy.py").write_text((checkout / "src" / "toy.py").read_text() + "\n")
    _, summary = mutate(checkout, "--resume", *stages)
    assert {entry["function"] for entry in summary["survivors"]["unargued"]} == {"is_large"}


@pytest.mark.slow
def test_the_named_mutants_of_the_host_core():
    """Every bug by name is found, and neither of the changes that change nothing is."""
    command = [sys.executable, SCRIPTS / "mutate.py", "--named", "--check"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stdout + result.stderr
