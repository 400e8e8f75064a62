"""Steer a model: take a direction from its hidden states, add it behind a layer, and serve the result.

python examples/steering.py [MODEL]
"""

import sys

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged import Engine, SamplingParams, load_module
from jpaged.models.dense import dense_logprobs

GLAD = ["What a wonderful day, I am so happy", "I love this place, it is beautiful", "We won, and everybody is glad"]
SAD = ["What a terrible day, I am so unhappy", "I hate this place, it is ugly", "We lost, and everybody is sad"]
PROMPT, LAYER, STRENGTH = "When I woke up this morning, I felt", 20, 40.0
PARAMS = SamplingParams(temperature=0.0, max_tokens=16)


class Steered(nnx.Module):
    """A layer of a decoder, and a vector that is added to the residual stream behind it."""

    def __init__(self, layer, vector):
        self.layer, self.attention, self.vector = layer, layer.attention, nnx.Param(vector)

    def before(self, x, rotation, inputs):
        return self.layer.before(x, rotation, inputs)

    def after(self, x, attended, inputs):
        output = self.layer.after(x, attended, inputs)
        return output._replace(stream=output.stream + self.vector[...].astype(output.stream.dtype))


class SteeredModel(nnx.Module):
    """The family's own module of a checkpoint with one layer replaced, as an engine serves modules of your own."""

    def __init__(self, module, index, vector):
        self.spec = nnx.static(module.origin.config.spec)
        self.decoder = module.decoder()
        self.decoder.layers[index] = Steered(self.decoder.layers[index], vector)

    def __call__(self, inputs, cache):
        return self.decoder(inputs, cache)

    def logits(self, hidden):
        return self.decoder.logits(hidden)


def direction(engine):
    """Return a unit vector [D]: where the hidden states of glad texts lie, seen from those of sad ones."""
    means = []
    for texts in (GLAD, SAD):
        sequences = [engine.tokenizer.encode(text) for text in texts]
        states = engine.logprobs(sequences, hidden=True)  # [B, N, D], padded by zeros
        means.append(np.mean([states[row, len(ids) - 1] for row, ids in enumerate(sequences)], axis=0))
    difference = means[0] - means[1]
    return difference / np.linalg.norm(difference)


def gladness(engine):
    """Return how much likelier glad texts are than sad ones: the difference of their mean logprobs."""
    scores = [[engine.logprobs([engine.tokenizer.encode(text)]).mean() for text in texts] for texts in (GLAD, SAD)]
    return float(np.mean(scores[0]) - np.mean(scores[1]))


def main(model):
    """Return the gladness of the model and of the steered one, and how far the engine is from the dense forward."""
    with Engine(model, max_num_seqs=8, max_model_len=256, quantization="none") as engine:
        vector, before = direction(engine), gladness(engine)
        print("as it is:", engine.generate(PROMPT, PARAMS)[0].outputs[0].text)
        ids = engine.tokenizer.encode(PROMPT)
    steered = SteeredModel(load_module(model), LAYER, jnp.asarray(STRENGTH * vector, jnp.float32))
    with Engine(steered, tokenizer=model, max_num_seqs=8, max_model_len=256) as engine:
        after = gladness(engine)
        print("steered:", engine.generate(PROMPT, PARAMS)[0].outputs[0].text)
        dense = dense_logprobs(steered, jnp.asarray([ids]))
        difference = float(np.abs(engine.logprobs([ids]) - dense).max())
        # Another strength is an update of weights, and compiles nothing.
        state = nnx.state(steered)
        state["decoder"]["layers"][LAYER]["vector"][...] *= -1
        engine.update_params(state)
        print("the other way:", engine.generate(PROMPT, PARAMS)[0].outputs[0].text)
        opposite = gladness(engine)
    return before, after, opposite, difference


if __name__ == "__main__":
    before, after, opposite, difference = main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
    print(f"gladness: {before:.3f}, steered {after:.3f}, the other way {opposite:.3f}")
    print("largest difference between engine and dense forward:", difference)
