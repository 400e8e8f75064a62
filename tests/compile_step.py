"""Compile whole steps for a CPU, or for chips that this machine lacks, and print what the compiler made of them.

    python compile_step.py cpu|v5e|v6e|v7x|h100 NUM_DEVICES float32|bfloat16 [NUM_LAYERS [xla]] [--config FILE]
        [--pages N] [--tokens N] [--quantization FORMAT [--tied]] [--expert-parallel]
        [--decodes-only | --prompts-only]

The output is one JSON object; sizes are in bytes per chip. Tests run this script as a process of its own, because JAX
reads its environment when it starts. The model has the shape of one with 8e9 parameters, on a CPU six layers of a model
with 1e8; the engine's sizes are the defaults. NUM_LAYERS cuts the model; steps with prompts are then smaller, for chips
there is one number of pages, and for a TPU alone only the forward programs. `xla`: attention in plain XLA. `--config`
names a file of tests/public_configs, whose model is compiled instead, cut to NUM_LAYERS layers of its kinds;
`page_bytes` are then those of a page on a chip for all layers. `--pages`: so many pages per chip. `--tokens`: so many
tokens in the largest step, of a cut model too, and in the plan of memory. `--quantization`:
matrices are codes, as int8, fp8 and int4 make them of floats, or as files of Q8_0, AWQ and fp8 blocks hold them, of a
model with 7e10 parameters on several devices. `converted` are then the arrays of another dtype that are as large as one
of them, and `true_bytes` are what a program's arguments should take. `--tied`: the embedding table makes the logits.
`--decodes-only`: of all programs only that of a step of decoding rows. `--prompts-only`: only that of a step with
prompts. `--expert-parallel`: whole experts on each
device. Of a model with experts the forward programs are compiled, on any devices; `beyond_choices` are then the arrays
that are larger than what all choices read and give, and than a matrix of one expert. On one CPU device these are also
the results of the custom calls of native code and the arrays that it keeps between its phases.
"""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

from compile_for_device import gate_of, mesh_of
from compile_tpu import KERNEL, kernel_arrays_in_vmem

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    **LLAMA_8B, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_70B = {
    **LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
NUM_PAGES = 128, 256
"""Pages per chip: as many as a v6e holds beside the weights, so that one layer's pages do not fit into its VMEM."""
MIN_TOKENS = 4
"""Tokens of the step whose products are counted; activations are then small beside the weights."""
STORED = "Q8_0", "AWQ", "fp8_blocks"
"""Formats of quantized files whose groups of inputs share a scale."""
VOCAB_TILE = 512
"""A TPU pads the vocabulary to a multiple of this many entries before it searches it."""
VMEM_KIB = 128 << 10
"""VMEM of a v6e chip in KiB."""
SHAPED = re.compile(r"= (?:\w+)\[([\d,]*)\]\S* (copy|convert|transpose|bitcast-convert|all-gather|all-reduce)\(")
STARTED = re.compile(r"= \(\w+\[([\d,]*)\](\S*) .* copy-start\(")
"""An asynchronous copy; the layout names S(1) where its destination is not the chip's main memory."""
GPU_KERNEL = re.compile(r'custom_call_target="mosaic_gpu')
"""A call of a kernel of ours on a GPU."""
NATIVE_CALL = re.compile(r" = \((.*)\) custom-call\(.*jpaged_products")
"""The results of a call of native products, which hold what it keeps between its phases too."""
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(?:-start)?\("
)
SLICE_OF_KERNEL = re.compile(r"= (\w+)\[[\d,]*\]\S* slice\(%?([\w.-]+)\), slice=\{([^}]*)\}")
"""A slice that a computation hands to a kernel in place: dtype, operand, and its ranges by axis."""
KERNEL_ALIGN = 256
"""Bytes at whose multiples the arrays of a GPU kernel have to begin."""
FUSED = re.compile(r"%(?:wrapped_|bitcast_)?(copy|convert|transpose)[\w.-]* = (?:\w+)\[([\d,]*)\]\S* fusion\(")


def materialized(hlo):
    """Return (kind, shape) of each copy, conversion and transposition that makes an array of its own.

    Instructions inside a fusion work on one element at a time and are left out.
    """
    fused = set(re.findall(r"calls=%?([\w.-]+)", hlo))
    found = []
    for block in re.split(r"\n(?=(?:ENTRY )?%?[\w.-]+ \()", hlo):
        name = re.match(r"(?:ENTRY )?%?([\w.-]+) \(", block)
        if name and name[1] not in fused:
            found += [(kind, dims) for dims, kind in SHAPED.findall(block)]
            found += [("copy-start", dims) for dims, layout in STARTED.findall(block) if "S(" not in layout]
            # A fusion that consists of such an instruction alone carries its name.
            found += FUSED.findall(block)
    return found


def collectives(hlo):
    """Return the number of elements and the dtype of the result of each collective, by its kind."""
    found = {}
    for shapes, kind in COLLECTIVE.findall(hlo):
        results = ((_count_text(dims), dtype) for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes))
        found.setdefault(kind, []).append(max(results))
    return found


def converted(hlo, state):
    """Return the arrays that have as many elements as a matrix of codes, in another dtype than the codes of such size.

    Instructions inside a fusion work on one element at a time and are left out, and so are arrays of one axis: bytes of
    a matrix on their way to a TPU's VMEM.
    """
    from flax import nnx

    names = {"int8": "s8", "int4": "s4", "float8_e4m3fn": "f8e4m3fn"}
    stored = {}
    for _, leaf in nnx.to_flat_state(state):
        if leaf.dtype.name in names:
            stored.setdefault(_count(leaf.sharding.shard_shape(leaf.shape)), set()).add(names[leaf.dtype.name])
    fused, found = set(re.findall(r"calls=%?([\w.-]+)", hlo)), set()
    for block in re.split(r"\n(?=(?:ENTRY )?%?[\w.-]+ \()", hlo):
        name = re.match(r"(?:ENTRY )?%?([\w.-]+) \(", block)
        if name and name[1] not in fused:
            for dtype, dims in re.findall(r" = (\w+)\[([\d,]*)\]", block):
                if "," in dims and dtype not in stored.get(_count_text(dims), {dtype}):
                    found.add(f"{dtype}[{dims}]")
    return sorted(found)


def beyond_choices(hlo, programs, num_tokens):
    """Return the arrays of a step with experts, on one chip, that are larger than those that it needs.

    It needs the rows that the choices of all tokens read and give, with a tile, and one expert's matrix. The cache, the
    hidden states of all tokens and weights that are none of experts may be moved whole. Native code keeps rows of all
    choices between its phases, those of each expert in whole tiles; XLA sees them as results of its custom calls.
    """
    import jax
    from flax import nnx

    from jpaged.pallas_kernels.grouped import MAX_TILE
    from jpaged.pallas_kernels.native.amx import TILE

    config = programs.weights.config
    experts = config.experts
    (mesh,) = {leaf.sharding.mesh for leaf in jax.tree.leaves(programs.weights.state)}
    num_shards = 1 if config.spreads_experts else mesh.size
    inner = -(-experts.width // num_shards)
    widest = max(2 * inner, config.hidden_size)
    largest = max(2 * inner * config.hidden_size, (num_tokens * experts.num_chosen + MAX_TILE) * widest)
    weights = [
        leaf for _, leaf in nnx.to_flat_state(programs.weights.state) if "num_experts" not in leaf.get_metadata()
    ]
    held = [*weights, *jax.tree.leaves(programs.state)]
    others = {_count(leaf.sharding.shard_shape(leaf.shape)) for leaf in held}
    fused, found = set(re.findall(r"calls=%?([\w.-]+)", hlo)), set()
    for block in re.split(r"\n(?=(?:ENTRY )?%?[\w.-]+ \()", hlo):
        name = re.match(r"(?:ENTRY )?%?([\w.-]+) \(", block)
        if name and name[1] not in fused:
            for dtype, dims, kind in re.findall(r" = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(", block):
                is_made = kind not in ("parameter", "get-tuple-element", "bitcast")
                if is_made and _count_text(dims) > largest and _count_text(dims) not in others:
                    found.add(f"{kind} {dtype}[{dims}]")
    native_rows = num_tokens * experts.num_chosen + experts.num_experts * 2 * TILE
    for results in NATIVE_CALL.findall(hlo):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]+)\]", results):
            if _count_text(dims) > native_rows * widest and _count_text(dims) not in others:
                found.add(f"native code {dtype}[{dims}]")
    return sorted(found)


def true_bytes(programs, kind):
    """Return the bytes of the weights and of the state that a program of this kind takes, on one chip.

    A sampler needs the head alone, which may be the embedding. The forward programs do without a head of its own.
    """
    from flax import nnx
    from jax import tree

    weights = [(path[0], _bytes(leaf)) for path, leaf in nnx.to_flat_state(programs.weights.state)]
    is_tied = programs.weights.config.tie_word_embeddings
    head = sum(size for module, size in weights if module == ("embed" if is_tied else "head"))
    if kind == "sample":
        return head + _bytes(programs.state.hidden) + _bytes(programs.state.last_tokens)
    total = sum(size for _, size in weights) + sum(map(_bytes, tree.leaves(programs.state)))
    return total if kind == "decode" or is_tied else total - head


def misaligned(hlo):
    """Return the slices that GPU kernels read in place and that do not begin where Mosaic's kernels can read them."""
    found = []
    for block in re.split(r"\n(?=(?:ENTRY )?%?[\w.-]+ \()", hlo):
        if block.startswith("ENTRY") or not GPU_KERNEL.search(block):
            continue
        for dtype, operand, ranges in SLICE_OF_KERNEL.findall(block):
            (dims,) = re.findall(rf"%?{re.escape(operand)} = \w+\[([\d,]*)\]", block)
            begins = [int(start) for start in re.findall(r"\[(\d+):", ranges)]
            index = 0
            for begin, size in zip(begins, map(int, dims.split(",")), strict=True):
                index = index * size + begin
            if index * (2 if "16" in dtype else 1 if "8" in dtype else 4) % KERNEL_ALIGN:
                found.append(f"{dtype}[{dims}] from {begins}")
    return found


def report(programs, key, cache_shapes, cache_bytes, num_pages):
    """Return a compiled step's memory in bytes, and the arrays it makes that are as large as one layer's keys."""
    from jpaged.startup.abstract_engine import own_bytes

    compiled = programs.lower[key]().compile()
    memory = compiled.memory_analysis()
    hlo = compiled.as_text()
    # Smaller copies are of the step's own tokens or pages. Logits, and rows of 8,192 tokens, may be larger than that.
    min_size = min(_count(shape) for shape in cache_shapes) // programs.state.cache.layout.num_layers
    vocab = programs.weights.config.vocab_size
    logits = {key[1] * vocab, key[1] * -(-vocab // VOCAB_TILE) * VOCAB_TILE}
    arrays = {(kind, dims) for kind, dims in materialized(hlo) if _count_text(dims) not in logits}
    arrays = {(kind, dims) for kind, dims in arrays if dims.split(",")[0] != str(key[1])}
    has_experts = programs.weights.config.experts is not None and key[0].startswith("forward")
    large = sorted(f"{kind} {dims}" for kind, dims in arrays if _count_text(dims) >= min_size)
    return {
        "arguments": memory.argument_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "own": own_bytes(compiled),
        "cache": cache_bytes,
        "hidden": _bytes(programs.state.hidden),
        "pages": num_pages,
        "page_tokens": programs.state.cache.layout.page_size,
        "large": large,
        "kernels": len(KERNEL.findall(hlo)) + len(GPU_KERNEL.findall(hlo)),
        "unknown_loops": sum(" while(" in line and "known_trip_count" not in line for line in hlo.splitlines()),
        "branches": hlo.count(" conditional("),
        "misaligned": misaligned(hlo),
        "computed_again": len(re.findall(r"%[\w.-]*\.remat\S* = ", hlo)),
        "in_vmem": kernel_arrays_in_vmem(hlo),
        "collectives": collectives(hlo),
        "true_bytes": true_bytes(programs, key[0]),
        "converted": converted(hlo, programs.weights.state),
        "beyond_choices": beyond_choices(hlo, programs, key[1]) if has_experts else [],
    }


def report_sampler(programs, key, rules):
    """Return a compiled sampler's memory in bytes, and the arrays it makes that are as large as a table of `rules`.

    It is the sampler for rows with masks, which does all that others do.
    """
    import jax

    compiled = (programs.lower | programs.lower_masked)[key]().compile()
    memory = compiled.memory_analysis()
    tables = {_count(leaf.shape) for leaf in jax.tree.leaves(rules)}
    min_size = max(tables) // 2
    return {
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "collectives": collectives(compiled.as_text()),
        "rules": sum(4 * _count(leaf.shape) for leaf in jax.tree.leaves(rules)),
        "large": sorted(
            f"{kind} {dims}"
            for kind, dims in set(materialized(compiled.as_text()))
            if _count_text(dims) in tables and _count_text(dims) >= min_size
        ),
    }


def product_bytes(weights, mesh, num_tokens):
    """Return (bytes that a step without attention reads and writes, bytes of the weights in its products).

    The compiler counts the first, with three corrections. On a CPU it counts a lookup of embeddings as a read of the
    whole table, which is subtracted. A TPU's compiler would fetch weights into VMEM early and count them twice, so it
    gets no room for that. It does not count what native code reads and writes, which is added.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jpaged.commands.bench.baselines import StepShape, bare_step
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
    """Return the bytes of all operands and results of a custom call, given its line of HLO."""
    tensors = re.findall(r"(f32|bf16)\[([\d,]+)\]", line.partition("api_version")[0])
    return sum(_count_text(dims) * (4 if kind == "f32" else 2) for kind, dims in tensors)


def _bytes(leaf):
    """Return the bytes of a sharded array on one chip."""
    return (
        _count(leaf.sharding.shard_shape(leaf.shape))
        * (4 if leaf.dtype.name == "int4" else 8 * leaf.dtype.itemsize)
        // 8
    )


def _count(shape):
    total = 1
    for size in shape:
        total *= size
    return total


def _count_text(dims):
    return _count(int(size) for size in dims.split(",") if size)


def formats_of(quantization, shapes):
    """Return the formats of tensors with these shapes: as floats are quantized, or as a quantized file stores them."""
    from jpaged.models.weights.at_load import formats_at_load
    from jpaged.pallas_kernels.code_formats import CODE_FORMATS, CodeFormat, float8_format

    if quantization not in STORED:
        return formats_at_load(quantization, shapes)
    stored = {"Q8_0": CODE_FORMATS["Q8_0"], "AWQ": CodeFormat("AWQ", 4, 128, has_zeros=True)}
    code_format = stored.get(quantization, float8_format(128))
    # Other files than GGUF have embedding and head as floats.
    is_coded = {
        name: len(shape) == 2 and (quantization == "Q8_0" or "layers" in name) for name, shape in shapes.items()
    }
    return tuple((name, code_format if is_coded[name] else None) for name in shapes)


def cut(config, num_layers):
    """Return a public model's config with so many layers: one kind after the other, where it has several."""
    from jpaged.models.opening.reading import config_from_hf

    whole = config_from_hf(config, Path("config.json"))
    kinds = list(dict.fromkeys(zip(whole.windows, (rope is None for rope in whole.ropes), strict=True)))
    layers = [kinds[index % len(kinds)] for index in range(num_layers)]
    depth = "n_layer" if "n_layer" in config else "num_hidden_layers"
    short = {key: value for key, value in config.items() if key not in ("layer_types", "no_rope_layers")}
    short |= {depth: num_layers, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    if len({window for window, _ in kinds}) > 1:
        short["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window, _ in layers]
    if len({is_still for _, is_still in kinds}) > 1:
        short["no_rope_layers"] = [int(not is_still) for _, is_still in layers]
    return short


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("num_devices", type=int)
    parser.add_argument("dtype")
    parser.add_argument("num_layers", type=int, nargs="?")
    parser.add_argument("backend", choices=["xla"], nargs="?")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--pages", type=int, nargs="+", default=NUM_PAGES)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--quantization", choices=["int8", "fp8", "int4", *STORED])
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--decodes-only", action="store_true")
    parser.add_argument("--prompts-only", action="store_true")
    parser.add_argument("--expert-parallel", action="store_true")
    args = parser.parse_args()
    target, num_devices, dtype = args.target, args.num_devices, args.dtype
    gate = gate_of(target, num_devices)
    mesh = mesh_of(gate, num_devices)
    import jax

    from jpaged.models.opening.reading import config_from_hf
    from jpaged.models.weights.code_arrays import has_group_scales
    from jpaged.models.weights.loading import tensor_shapes
    from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend
    from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
    from jpaged.sampling.logit_rules import rule_shapes
    from jpaged.sampling.logit_rules_spec import LogitRulesSpec
    from jpaged.sampling.sampler import SampleSettings
    from jpaged.sampling.sampling_params import SampleMode
    from jpaged.startup.abstract_engine import AbstractEngine
    from jpaged.startup.sizing.step_memory import activation_bytes, estimated_program_bytes
    from jpaged.step.program_keys import sample_key
    from jpaged.step.step_sizes import StepSizes

    large = LLAMA_70B if args.quantization and num_devices > 1 else LLAMA_8B
    shape = dict(SMALL if target == "cpu" else large)
    shape |= {"tie_word_embeddings": True} if args.tied else {}
    if args.config:
        shape = cut(json.loads(args.config.read_text())["config"], args.num_layers)
    elif args.num_layers:
        shape["num_hidden_layers"] = args.num_layers
    model = replace(config_from_hf(shape, Path("config.json")), spreads_experts=args.expert_parallel)
    num_seqs, num_tokens = (64, 1024) if target == "cpu" else (256, 8192)
    num_tokens = args.tokens or num_tokens
    if gate is None:
        backend = NativeBackend() if num_devices == 1 else XlaBackend(platform="cpu")
    elif target == "h100" and (args.backend == "xla" or jax.__version_info__ < (0, 11)):
        backend = XlaBackend(platform="gpu")
    else:
        heads = model.spec_on_chip(num_devices).layers[0]
        backend = gate.backend(heads.num_heads, heads.num_kv_heads, heads.head_size, model.spec.windows)
    found = {"kind": mesh.devices.flat[0].device_kind, "backend": backend.name, "num_devices": num_devices, "steps": {}}
    found |= {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
    sizes = StepSizes(dtype, dtype, 64 if target in ("cpu", "h100") else 128, 4096, num_seqs, num_tokens)
    itemsize = activation_bytes(dtype, on_cpu=target == "cpu")
    on_chip = model.spec_on_chip(num_devices, backend.layer_ops, itemsize)
    found["kept"] = estimated_program_bytes(on_chip, itemsize, num_tokens, num_seqs)
    rules_spec = LogitRulesSpec(model.vocab_size)
    formats = formats_of(args.quantization, tensor_shapes(model, mesh)) if args.quantization else ()
    settings = SampleSettings(max_logprobs=20)
    engine = AbstractEngine(model, mesh, backend, rules_spec, settings, num_decode_steps=16, formats=formats)
    is_cut = args.num_layers is not None
    if args.config:
        whole = config_from_hf(json.loads(args.config.read_text())["config"], args.config)
        found["page_bytes"] = replace(engine, model=whole).page_bytes(sizes.block_size, dtype)
    has_one = is_cut and gate is not None
    for num_pages in (num_devices * pages for pages in args.pages[: 1 if has_one else None]):
        builder = engine.builder(sizes)
        programs, random = engine.programs(builder, num_blocks=num_pages), SampleMode.RANDOM
        decode_mode, sample_mode = builder.buckets.decode_mode_for(random), builder.buckets.mode_for(random)
        cache = programs.state.cache
        cache_shapes = [array.sharding.shard_shape(array.shape) for array in cache.pages]
        cache_bytes = sum(map(_count, cache_shapes)) * cache.layout.stored_dtype.itemsize
        with jax.set_mesh(mesh):
            if not (found["steps"] or is_cut):
                if target != "h100":  # Its compiler counts no bytes.
                    found["products"] = product_bytes(programs.weights, mesh, MIN_TOKENS)
                rules = rule_shapes(rules_spec, num_seqs + 1)
                key = sample_key(builder.buckets, num_seqs, SampleMode.FULL, is_masked=True)
                found["sampler"] = report_sampler(programs, key, rules)
            decodes = "forward" if target == "cpu" else "forward_decodes", num_seqs
            prompt_tokens = 2 * num_seqs if is_cut and args.tokens is None else num_tokens
            keys = decodes, ("forward", prompt_tokens), ("decode", num_seqs, decode_mode)
            if args.quantization:
                # A GPU has no loop of decode steps where groups have scales.
                has_loop = target != "h100" or not has_group_scales(programs.weights.state)
                keys = *keys[: 3 if has_loop else 2], ("sample", 8, sample_mode)
            elif is_cut and not args.prompts_only:
                if model.experts is not None:
                    keys = keys[:2]
                elif args.config and num_devices > 1:
                    keys = keys[2:]  # A step and the drawing of its tokens.
                elif args.config:  # What is particular to a family's logits is in the samplers.
                    keys = (*keys[:2], ("sample", 8, sample_mode))
                elif target == "h100" or num_devices > 1:
                    keys = (*keys, ("sample", 8, SampleMode.FULL))
                else:
                    keys = keys[:2]
            if args.decodes_only:
                keys = keys[:1]
            elif args.prompts_only:
                keys = keys[1:2]
            for key in keys:
                step = report(programs, key, cache_shapes, cache_bytes, num_pages)
                found["steps"].setdefault(" ".join(map(str, key)), []).append(step)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
