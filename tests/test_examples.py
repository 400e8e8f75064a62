"""The examples run as they are written, each in a process of its own, within a minute."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*arguments: str) -> str:
    """Run Python in the folder of the examples, and return what it prints."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=EXAMPLES, env=environment, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.slow
def test_a_module_of_ones_own_is_served_and_updated():
    printed = run("own_model.py").splitlines()
    assert float(printed[1].split(":")[1]) < 1e-4
    assert printed[2] == "(WeightVersion(version=1, start=0, end=16),)"
    assert len((EXAMPLES / "own_model.py").read_text().splitlines()) <= 80


@pytest.mark.slow
def test_a_model_of_linen_is_served_and_updated():
    printed = run("linen_model.py").splitlines()
    assert float(printed[-1].split(":")[1]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_reward_rises(seed):
    history = json.loads(run("-c", f"import grpo, json; print(json.dumps(grpo.main({seed})))").splitlines()[-1])
    assert sum(history[-5:]) / 5 > sum(history[:5]) / 5 + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_reward_rises_while_samples_are_drawn_beside_the_trainer(seed):
    printed = run("-c", f"import async_grpo, json; print(json.dumps(async_grpo.main({seed})))")
    history, staleness = json.loads(printed.splitlines()[-1])
    assert sum(history[-5:]) / 5 > sum(history[:5]) / 5 + 0.15
    assert 1 <= staleness <= 2
    assert len((EXAMPLES / "async_grpo.py").read_text().splitlines()) <= 120


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_student_comes_near_its_teacher(seed):
    history = json.loads(run("-c", f"import distill, json; print(json.dumps(distill.main({seed})))").splitlines()[-1])
    assert all(later < earlier for earlier, later in pairwise(history))
    assert history[-1] < 0.1 * history[0]
    assert len((EXAMPLES / "distill.py").read_text().splitlines()) <= 120


@pytest.mark.slow
def test_lm_eval_asks_all_three_questions_in_any_folder():
    pytest.importorskip("lm_eval", reason="pip install lm_eval")
    printed = run(
        "-c",
        "import sys, os; sys.path.insert(0, os.getcwd()); os.chdir('/'); "
        "import lm_eval_model, json; print(json.dumps(lm_eval_model.main('smollm2-135m'), default=float))",
    )
    results = json.loads(printed.splitlines()[-1])
    assert results["capitals_choice"]["acc,none"] == 1.0
    assert results["capitals_text"]["exact_match,none"] >= 0.5
    assert 2.0 < results["capitals_rolling"]["byte_perplexity,none"] < 5.0


@pytest.mark.slow
def test_a_vector_behind_a_layer_steers_what_is_served():
    printed = run("-c", "import steering, json; print(json.dumps(steering.main('smollm2-135m')))").splitlines()
    before, after, opposite, difference = json.loads(printed[-1])
    assert opposite < before - 0.1 < after - 0.2
    assert difference < 1e-4
    assert len((EXAMPLES / "steering.py").read_text().splitlines()) <= 100


@pytest.mark.slow
def test_a_training_state_in_the_layout_of_maxtext_is_served():
    printed = run("-c", "import maxtext_state; print(maxtext_state.main())").splitlines()
    assert float(printed[-1]) < 1e-4
    assert "updates: 2, recompiled steps: 0" in printed


@pytest.mark.slow
def test_tunix_trains_with_our_rollout():
    pytest.importorskip("tunix", reason="pip install google-tunix")
    printed = run("tunix_rollout.py")
    assert "updates: 30, recompiled steps: 0" in printed
