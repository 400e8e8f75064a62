"""Random outputs of a grammar, drawn from its masks alone, as a model without any preference would write them."""

import random

import numpy as np

from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.chat.thinking import Thinking
from jpaged.text.grammar.grammar import Grammars


def random_output(grammars, eos, seed, *, max_tokens=300, thinking=Thinking.NONE, token_bytes, **params):
    """Return the bytes of an output, and whether the grammar has ended it.

    `eos` is the id of the token that ends an output, `token_bytes` gives the bytes of a token, and `params` are the
    fields of StructuredOutputsParams.
    """
    rng = random.Random(seed)
    matcher = grammars.matcher(grammars.grammar_of(StructuredOutputsParams(**params), thinking))
    output = b""
    for _ in range(max_tokens):
        mask = grammars.masks([matcher])[0]
        assert not matcher.failure, matcher.failure
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        # An end that is allowed comes soon: otherwise optional parts would go on to the last token.
        token_id = eos if eos in allowed and rng.random() < 0.3 else rng.choice(allowed)
        is_over = matcher.advance(token_id)
        if token_id != eos:
            output += token_bytes(token_id)
        if is_over:
            return output, True
    return output, False


def grammars_of(tokenizer):
    """Return the grammars of a model with a row of logits for each id of a tokenizer."""
    return Grammars(tokenizer, tokenizer.vocab_size, {tokenizer.eos_token_id})
