"""Compiles whole steps for chips that are not there, and for a CPU; prints what came of each.

    python compile_step.py cpu|v6e|h100 NUM_DEVICES [NUM_LAYERS]

One JSON object, bytes per chip. A process of its own, because JAX reads its environment when it starts. The model is
shaped as one of 8e9 parameters, on a CPU as one of 1e8; the sizes are the defaults.
"""

import json
import re
import sys
from pathlib import Path

from compile_for_device import gate_of, mesh_of

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    **LLAMA_8B, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip
NUM_PAGES = 128, 256
"""For each chip, as many as a v6e holds beside the weights: a layer's are then too many for its VMEM."""
LEAST_TOKENS = 4
"""Of a step whose products are counted: so few that activations are little beside the weights."""
VOCAB_TILE = 512
"""A TPU pads a vocabulary that it searches to a multiple of that."""
VMEM_KIB = 128 << 10
"""Of a v6e chip."""
SHAPED = re.compile(r"= (?:\w+)\[([\d,]*)\]\S* (copy|convert|transpose|bitcast-convert|all-gather|all-reduce)\(")
STARTED = re.compile(r"= \(\w+\[([\d,]*)\](\S*) .* copy-start\(")
"""A copy beside other work; of the buffer that it makes, memory that is not a chip's main one is called S(1)."""
FUSED = re.compile(r"%(?:wrapped_|bitcast_)?(copy|convert|transpose)[\w.-]* = (?:\w+)\[([\d,]*)\]\S* fusion\(")


def made_whole(hlo):
    """(kind, shape) of what a program makes as an array: not what happens to one element at a time inside a fusion."""
    fused = set(re.findall(r"calls=%?([\w.-]+)", hlo))
    found = []
    for block in re.split(r"\n(?=(?:ENTRY )?%?[\w.-]+ \()", hlo):
        name = re.match(r"(?:ENTRY )?%?([\w.-]+) \(", block)
        if name and name[1] not in fused:
            found += [(kind, dims) for dims, kind in SHAPED.findall(block)]
            found += [("copy-start", dims) for dims, layout in STARTED.findall(block) if "S(" not in layout]
            # A fusion that is nothing but such a thing carries its name.
            found += FUSED.findall(block)
    return found


def report(programs, key, cache_shapes, cache_bytes, num_pages):
    """What a compiled program says of itself, and whatever in it has the size of a layer's keys or more."""
    compiled = programs.lower[key]().compile()
    memory = compiled.memory_analysis()
    hlo = compiled.as_text()
    # Of one layer: a copy of less than that is of a step's own tokens or pages. Logits may be larger than it.
    least = min(_count(shape) for shape in cache_shapes) // programs.state.cache.layout.num_layers
    vocab = LLAMA_8B["vocab_size"]
    logits = {key[1] * vocab, key[1] * -(-vocab // VOCAB_TILE) * VOCAB_TILE}
    whole = {(kind, dims) for kind, dims in made_whole(hlo) if _count_text(dims) not in logits}
    large = sorted(f"{kind} {dims}" for kind, dims in whole if _count_text(dims) >= least)
    return {
        "arguments": memory.argument_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "cache": cache_bytes,
        "hidden": _bytes(programs.state.hidden),
        "pages": num_pages,
        "large": large,
    }


def report_sampler(programs, key, rules):
    """The same of a sampler, which keeps `rules` up: whatever in it has the size of one of their large tables."""
    import jax

    compiled = programs.lower[key]().compile()
    memory = compiled.memory_analysis()
    tables = {_count(leaf.shape) for leaf in jax.tree.leaves(rules)}
    least = max(tables) // 2
    return {
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "rules": sum(4 * _count(leaf.shape) for leaf in jax.tree.leaves(rules)),
        "large": sorted(
            f"{kind} {dims}"
            for kind, dims in set(made_whole(compiled.as_text()))
            if _count_text(dims) in tables and _count_text(dims) >= least
        ),
    }


def product_bytes(weights, mesh, num_tokens):
    """(read and written by a step without attention, as its compiler counts; of the weights in its products).

    On a CPU, looking rows up is counted as reading the whole table of embeddings, which is taken off. A TPU's compiler
    fetches weights ahead into VMEM and counts them there once more, so here it gets no room for that. What native code
    reads and writes nobody counts but us.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jpaged.contenders import StepShape, bare_step
    from jpaged.sharding import replicated

    run = bare_step(weights, StepShape(num_tokens, num_tokens))
    token = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
    with jax.set_mesh(mesh):
        lowered = jax.jit(run).lower(jax.tree.leaves(weights.state), token)
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    compiled = lowered.compile({"xla_tpu_scoped_vmem_limit_kib": str(VMEM_KIB)} if on_tpu else None)
    cost = compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    by_path = {path: _bytes(leaf) for path, leaf in nnx.to_flat_state(weights.state)}
    table, is_tied = by_path["embed", "weight"], ("head", "weight") not in by_path
    in_products = sum(by_path.values()) - (0 if is_tied else table)
    native = sum(_tensor_bytes(line) for line in compiled.as_text().splitlines() if "jpaged_product" in line)
    return (cost or {}).get("bytes accessed", 0) + native - (0 if on_tpu else table), in_products


def _tensor_bytes(line):
    """Of all that a custom call takes and gives."""
    tensors = re.findall(r"(f32|bf16)\[([\d,]+)\]", line.partition("api_version")[0])
    return sum(_count_text(dims) * (4 if kind == "f32" else 2) for kind, dims in tensors)


def _bytes(leaf):
    """On one chip."""
    return _count(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _count(shape):
    total = 1
    for size in shape:
        total *= size
    return total


def _count_text(dims):
    return _count(int(size) for size in dims.split(",") if size)


def main() -> None:
    target, num_devices = sys.argv[1], int(sys.argv[2])
    gate = gate_of(target, num_devices)
    mesh = mesh_of(gate, num_devices)
    import jax

    from jpaged.assembly import planned_programs, step_tools
    from jpaged.logit_rules import rule_shapes
    from jpaged.models.config import config_from_hf
    from jpaged.pallas_kernels.ragged_paged_attention import XlaBackend
    from jpaged.rule_book import RuleBook
    from jpaged.sampler import SampleSettings
    from jpaged.sampling_params import SampleMode
    from jpaged.sizing import StepSizes

    shape = dict(SMALL if target == "cpu" else LLAMA_8B)
    if len(sys.argv) > 3:
        shape["num_hidden_layers"] = int(sys.argv[3])
    model = config_from_hf(shape, Path("config.json"))
    dtypes = ["float32", "bfloat16"] if target == "cpu" else ["bfloat16"]
    num_seqs, num_tokens = (64, 1024) if target == "cpu" else (256, 8192)
    if gate is None:
        backend = XlaBackend(platform="cpu")
    elif target == "h100" and jax.__version_info__ < (0, 11):
        backend = XlaBackend(platform="gpu")
    else:
        heads = model.num_heads // num_devices, model.num_kv_heads // num_devices
        backend = gate.backend(*heads, model.head_size, (None,))
    found = {"kind": mesh.devices.flat[0].device_kind, "backend": backend.name, "num_devices": num_devices, "steps": {}}
    for dtype in dtypes:
        sizes = StepSizes(dtype, dtype, 128 if target == "v6e" else 64, 4096, num_seqs, num_tokens)
        rule_book = RuleBook(model.vocab_size)
        buckets, builder = step_tools(sizes, backend, mesh.devices.flat[0].platform, rule_book)
        for num_pages in (num_devices * pages for pages in NUM_PAGES):
            programs = planned_programs(
                model,
                sizes,
                mesh,
                backend,
                buckets,
                builder,
                num_blocks=num_pages,
                num_decode_steps=16,
                settings=SampleSettings(max_logprobs=20),
            )
            layout = programs.state.cache.layout
            pages = programs.state.cache.pages
            cache_shapes = [array.sharding.shard_shape(array.shape) for array in pages]
            cache_bytes = sum(map(_count, cache_shapes)) * layout.stored_dtype.itemsize
            if num_pages == num_devices * NUM_PAGES[0]:
                found.setdefault("products", {})[dtype] = product_bytes(programs.weights, mesh, LEAST_TOKENS)
                rules, key = rule_shapes(rule_book, num_seqs + 1), ("sample", num_seqs, SampleMode.EVERYTHING)
                with jax.set_mesh(mesh):
                    found.setdefault("samplers", {})[dtype] = report_sampler(programs, key, rules)
            for key in (("forward", num_seqs), ("forward", 2 * num_seqs), ("decode", num_seqs)):
                with jax.set_mesh(mesh):
                    name = f"{dtype} {' '.join(map(str, key))}"
                    one = report(programs, key, cache_shapes, cache_bytes, num_pages)
                    found["steps"].setdefault(name, []).append(one)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
