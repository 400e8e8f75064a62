"""Serve the weights of a trainer whose layers are stacked along axis 1, from its whole training state.

    python examples/maxtext_state.py [MODEL]

The tree has the names, shapes and conventions that MaxText has for models of the Llama family: matrices [in, L, out]
with heads as axes of their own, the halves of rotated heads interleaved, queries scaled by 1/√head size. The trainer
takes a step of Adam in this layout; the engine, which has begun with random weights, gets the result.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import jpaged
from jpaged import Engine, SamplingParams

MATRICES = {
    "self_attention.query": "self_attn.q_proj",
    "self_attention.key": "self_attn.k_proj",
    "self_attention.value": "self_attn.v_proj",
    "self_attention.out": "self_attn.o_proj",
    "mlp.wi_0": "mlp.gate_proj",
    "mlp.wi_1": "mlp.up_proj",
    "mlp.wo": "mlp.down_proj",
}
NORMS = {
    "pre_self_attention_layer_norm": "input_layernorm",
    "post_self_attention_layer_norm": "post_attention_layernorm",
}


def to_maxtext(tensors: dict[str, jax.Array], head_size: int) -> dict:
    """Return MaxText's tree of stacked Hugging Face tensors."""
    layers: dict = {}
    for name, theirs in MATRICES.items():
        matrix = jnp.moveaxis(tensors[f"model.layers.{theirs}.weight"], (0, 2), (1, 0))  # [in, L, out]
        if name == "self_attention.out":
            matrix = matrix.reshape(-1, head_size, *matrix.shape[1:]).swapaxes(1, 2)  # [H, L, head size, D]
        elif name.startswith("self_attention"):
            matrix = matrix.reshape(*matrix.shape[:2], -1, head_size)  # [D, L, H, head size]
        if name in ("self_attention.query", "self_attention.key"):
            matrix = jnp.stack(jnp.split(matrix, 2, axis=-1), axis=-1).reshape(matrix.shape)
        if name == "self_attention.query":
            matrix = matrix / np.sqrt(head_size)
        block, part = name.split(".")
        layers.setdefault(block, {})[part] = {"kernel": matrix}
    layers |= {name: {"scale": tensors[f"model.layers.{theirs}.weight"].T} for name, theirs in NORMS.items()}
    decoder = {"layers": layers, "decoder_norm": {"scale": tensors["model.norm.weight"]}}
    if "lm_head.weight" in tensors:  # No model whose head is tied to the embedding has it.
        decoder["logits_dense"] = {"kernel": tensors["lm_head.weight"].T}
    return {"decoder": decoder, "token_embedder": {"embedding": tensors["model.embed_tokens.weight"]}}


def to_tensors(params: dict) -> dict[str, jax.Array]:
    """Return stacked Hugging Face tensors [L, out, in] of MaxText's tree, which an engine takes."""
    layers = params["decoder"]["layers"]
    tensors = {
        "model.embed_tokens.weight": params["token_embedder"]["embedding"],
        "model.norm.weight": params["decoder"]["decoder_norm"]["scale"],
    }
    if "logits_dense" in params["decoder"]:
        tensors["lm_head.weight"] = params["decoder"]["logits_dense"]["kernel"].T
    for name, ours in MATRICES.items():
        block, part = name.split(".")
        matrix = layers[block][part]["kernel"]
        if name in ("self_attention.query", "self_attention.key"):
            matrix = jnp.concatenate([matrix[..., ::2], matrix[..., 1::2]], axis=-1)
        if name == "self_attention.query":
            matrix = matrix * np.sqrt(matrix.shape[-1])
        if name == "self_attention.out":
            matrix = matrix.swapaxes(1, 2).reshape(-1, matrix.shape[1], matrix.shape[3])  # [H × head size, L, D]
        elif block == "self_attention":
            matrix = matrix.reshape(*matrix.shape[:2], -1)  # [D, L, H × head size]
        tensors[f"model.layers.{ours}.weight"] = jnp.moveaxis(matrix, (1, 0), (0, 2))
    return tensors | {f"model.layers.{ours}.weight": layers[name]["scale"].T for name, ours in NORMS.items()}


def module_with(module: nnx.Module, tensors: dict[str, jax.Array]) -> nnx.Module:
    """Return the module with these parameters, which may be traced."""
    module = nnx.clone(module)
    for name, stacked in tensors.items():
        is_layered = name.startswith("model.layers.")
        names = [name.replace("layers.", f"layers.{i}.", 1) for i in range(len(stacked))] if is_layered else [name]
        for own, tensor in zip(names, stacked if is_layered else [stacked], strict=True):
            node = module.params
            for key in own.split("."):
                node = node[key]
            node.set_value(tensor)
    return module


def main(model: str = "smollm2-135m") -> float:
    """Train for a step and update an engine; return how far its logprobs are from the trainer's."""
    module = jpaged.load_module(model)
    with Engine(model, dtype="float32", load_format="dummy", max_model_len=256) as engine:
        params = to_maxtext(module.hf_state(stacked=True), engine.handle.spec.layers[0].head_size)
        state = TrainState.create(apply_fn=None, params={"params": params}, tx=optax.adam(1e-5))
        ids = np.asarray([engine.tokenizer.encode("The capital of France is Paris, and that of Italy is Rome.")])

        @jax.jit
        def logprobs_of(params: dict) -> jax.Array:
            logits = module_with(module, to_tensors(params["params"]))(ids)[:, :-1]
            return jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], axis=-1)[..., 0]

        before = logprobs_of(state.params)
        state = state.apply_gradients(grads=jax.grad(lambda params: -logprobs_of(params).mean())(state.params))
        wanted = logprobs_of(state.params)
        for version in (1, 2):
            engine.update_params(state.replace(params=to_tensors(state.params["params"])), version=version)
            found = engine.logprobs(ids)
        prompt = "The capital of France is"
        text = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
        print(f"{prompt}{text}")
        distance = float(jnp.abs(found - wanted).max())
        print(f"mean logprob {float(before.mean()):.4f}, after a step {float(wanted.mean()):.4f}")
        print(f"the engine's logprobs − the trainer's, at most: {distance:.1e}")
        print(f"updates: 2, recompiled steps: {engine.stats()['recompiles']}")
    return distance


if __name__ == "__main__":
    main(*sys.argv[1:])
