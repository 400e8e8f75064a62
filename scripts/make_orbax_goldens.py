"""Makes tests/golden/orbax: the folder of a checkpoint manager of an older orbax, which tests open with a newer one.

Its only step holds a training state, averaged parameters and metrics. The parameters are those of a tiny Llama: the
tensor number n, counted from 0 in the order of the names, holds n + 0, n + 1/64, n + 2/64, …

Run this once, in an environment of its own:

    python3.12 -m venv gold
    gold/bin/pip install orbax-checkpoint==0.11.40 jax==0.10.2 optax==0.2.8
    gold/bin/python scripts/make_orbax_goldens.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

FOLDER = Path(__file__).parents[1] / "tests" / "golden" / "orbax"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64, "dtype": "float32",
}  # fmt: skip
LAYER_SHAPES = {
    "input_layernorm": (8,), "mlp.down_proj": (8, 12), "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8),
    "post_attention_layernorm": (8,), "self_attn.k_proj": (8, 8), "self_attn.o_proj": (8, 8),
    "self_attn.q_proj": (8, 8), "self_attn.v_proj": (8, 8),
}  # fmt: skip
SHAPES = {
    "lm_head": (16, 8),
    "model.embed_tokens": (16, 8),
    **{f"model.layers.0.{name}": shape for name, shape in LAYER_SHAPES.items()},
    "model.norm": (8,),
}


def main() -> None:
    params = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        params[f"{name}.weight"] = jnp.asarray(number + np.arange(np.prod(shape)).reshape(shape) / 64, jnp.float32)
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params), "step": 5, "name": "a run", "seed": None}
    shutil.rmtree(FOLDER, ignore_errors=True)
    with ocp.CheckpointManager(FOLDER) as manager:
        items = {
            "state": ocp.args.PyTreeSave(state),
            "ema_params": ocp.args.StandardSave({name: jnp.zeros_like(array) for name, array in params.items()}),
            "metrics": ocp.args.JsonSave({"loss": 1.5, "note": "best"}),
        }
        manager.save(5, args=ocp.args.Composite(**items))
    (FOLDER / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")


if __name__ == "__main__":
    main()
