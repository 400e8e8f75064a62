"""Prompts as trainers hold them: one padded array with a mask or lengths, and lists of scalars."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.errors import InvalidRequestError
from jpaged.intake.offline import as_prompts, as_sequences

IDS = np.array([[0, 0, 5, 6], [7, 8, 9, 3], [4, 0, 0, 0]])
MASK = np.array([[0, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]])


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_rows_are_prompts_without_their_padding(kind):
    prompts = as_prompts({"prompt_token_ids": kind(IDS), "mask": kind(MASK), "cache_salt": "s"})
    assert [prompt["prompt_token_ids"].tolist() for prompt in prompts] == [[5, 6], [7, 8, 9, 3], [4]]
    assert {prompt["cache_salt"] for prompt in prompts} == {"s"}
    prompts = as_prompts({"prompt_token_ids": kind(IDS[1:]), "lengths": kind([4, 1])})
    assert [prompt["prompt_token_ids"].tolist() for prompt in prompts] == [[7, 8, 9, 3], [4]]
    assert len(as_prompts({"prompt_token_ids": kind(IDS)})) == 3


@pytest.mark.parametrize("kind", [np.int32, jnp.int32], ids=["numpy", "jax"])
def test_a_list_of_scalars_is_one_prompt(kind):
    ids = [kind(5), kind(7)]
    assert as_prompts(ids) == [[5, 7]]
    assert as_prompts([ids, [3]]) == [[5, 7], [3]]
    assert as_sequences(ids) == ([[5, 7]], True)
    assert as_sequences([ids, [3]]) == ([[5, 7], [3]], False)


WRONG = {
    "a hole": (
        {"mask": [[1, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]]},
        "mask: got row 0 with holes, allowed: a run; give",
    ),
    "an empty row": ({"mask": 0 * MASK}, "mask: got row 0 without a token"),
    "another shape": ({"mask": MASK[:2]}, r"mask: got the shape \[2, 4\], allowed: \[3, 4\]"),
    "no booleans": ({"mask": 2 * MASK}, "mask: got other numbers than 0 and 1"),
    "too long": ({"lengths": [1, 5, 1]}, "lengths: got 5, allowed: 1 to 4"),
    "nothing": ({"lengths": [1, 0, 1]}, "lengths: got 0, allowed: 1 to 4"),
    "too few": ({"lengths": [1, 2]}, r"lengths: got int64 \[2\], allowed: integers \[3\]"),
    "no integers": ({"lengths": [1.0, 2.0, 1.0]}, r"lengths: got float64 \[3\]"),
    "a list": (
        {"prompt_token_ids": [[1, 2]], "lengths": [2]},
        r"prompt_token_ids: got \[\[1, 2\]\], allowed: an array",
    ),
    "no columns": ({"prompt_token_ids": IDS[:, :0]}, "prompt_token_ids: got array"),
    "both": ({"lengths": [1, 2, 1], "mask": MASK}, "prompts: got a mask and lengths, allowed: one of them"),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_a_mask_or_lengths_that_do_not_fit_are_refused(given, message):
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        as_prompts({"prompt_token_ids": IDS, **given})
