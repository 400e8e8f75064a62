"""An engine as a model of EleutherAI's lm-evaluation-harness, on tasks of examples/tasks. Needs: pip install lm_eval

python examples/lm_eval_model.py [MODEL]
"""

import sys
from contextlib import chdir
from itertools import islice
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jpaged import Engine, SamplingParams

TASKS = Path(__file__).resolve().parent / "tasks"


class JpagedLM(LM):
    """The three questions that the harness asks a model."""

    def __init__(self, engine: Engine):
        super().__init__()
        self.engine, self.tokenizer = engine, engine.tokenizer
        self.max_len = engine.step_sizes.max_model_len - 1

    def loglikelihood(self, requests: list[Instance], **options) -> list[tuple[float, bool]]:
        """Return the logprob of each continuation, and whether greedy decoding would give it."""
        return self._score([self._split(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance], **options) -> list[float]:
        """Return the logprob of each whole text, in windows where it is longer than the context."""
        texts = [self.tokenizer.encode(request.args[0], add_special_tokens=False) for request in requests]
        first, length = self._first_token(), self.max_len - 1
        windows = [list(map(make_disjoint_window, get_rolling_token_windows(ids, first, length, 1))) for ids in texts]
        scores = iter(self._score([window for of_text in windows for window in of_text]))
        return [sum(score for score, _ in islice(scores, len(of_text))) for of_text in windows]

    def generate_until(self, requests: list[Instance], **options) -> list[str]:
        """Return the text that follows each context, up to one of its stop strings."""
        contexts, params = [], []
        for context, given in (request.args for request in requests):
            max_tokens, until = given.get("max_gen_toks", 256), given.get("until", [])
            contexts.append(self.tokenizer.encode(context)[max_tokens - self.max_len - 1 :])  # Its end, if it is long.
            drawing = {name: given[name] for name in ("temperature", "top_p", "top_k") if name in given}
            drawing = drawing if given.get("do_sample") else {"temperature": 0.0}
            stop = [until] if isinstance(until, str) else until
            params.append(SamplingParams(max_tokens=max_tokens, stop=stop, **drawing))
        return [output.outputs[0].text for output in self.engine.generate(contexts, params)]

    def _first_token(self) -> int:
        first = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if first is None else first

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of context and continuation; spaces between the two belong to the continuation."""
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        whole = self.tokenizer.encode(bare + continuation)
        length = len(self.tokenizer.encode(bare)) if bare else 0
        return (whole[:length] or [self._first_token()]), whole[length:]

    def _score(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return the sum of the logprobs of each second part, and whether all of its tokens are the likeliest.

        Answers to one question share its context, which is computed once.
        """
        continuations = [continuation[-self.max_len :] for _, continuation in pairs]
        contexts = [
            context[len(continuation) - self.max_len - 1 :]  # Its end, if both are too long.
            for (context, _), continuation in zip(pairs, continuations, strict=True)
        ]
        scores = self.engine.score(contexts, continuations)
        is_greedy = (scores.is_greedy | ~scores.mask).all(axis=1)
        return list(zip(scores.sums.tolist(), is_greedy.tolist(), strict=True))


def main(model: str) -> dict[str, dict[str, float]]:
    """Evaluate a model on the tasks, and return their results by name."""
    with Engine(model, max_model_len=2048) as engine:
        manager = TaskManager(include_path=str(TASKS), include_defaults=False)
        tasks = [path.stem for path in sorted(TASKS.glob("*.yaml"))]
        with chdir(TASKS):  # The names of data files in tasks are relative to the working directory.
            found = simple_evaluate(JpagedLM(engine), tasks=tasks, task_manager=manager, bootstrap_iters=0)
    return found["results"]


if __name__ == "__main__":
    for name, results in main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m").items():
        print(name, {metric: value for metric, value in results.items() if metric.endswith(",none")})
