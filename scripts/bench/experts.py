"""Models with experts on a CPU, beside dense models of the same active bytes, the processor's reads, and llama.cpp.

    gcc -O2 -march=native -o peaks scripts/bench/peaks.c -lpthread
    python scripts/bench/experts.py --model S --directory checkpoints --peaks ./peaks \
        --llama "python scripts/peers/llama.py" --output docs/measurements/experts_S.json

Models have seeded weights in float32. S has SmolLM2-135M's width, with 8 experts of which a token takes 2; L has 32 of
which it takes 4. The dense twin is a Llama whose MLP is as wide as the experts of a token together. The checkpoints
are written at first, the GGUF file of the same values with them. Engines and llama.cpp (scripts/peers) take turns.
Ratios are those of one round, and figures their medians over the rounds. A decode step is what more tokens take beyond
the first ones, per step.

The experts that 16 rows choose in the steps that are timed are counted afterwards, by the same model without pages;
their bytes, each expert's once a step and layer, in the time of a step are compared with what two threads read.
Exit status 1 says that a gate of GATES is missed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from steps import measured_peaks, step_bytes

from jpaged import Engine, SamplingParams
from jpaged.commands.bench.baselines import Baseline, RecordedEngine
from jpaged.commands.bench.peer import PeerBaseline
from jpaged.commands.bench.report import machine
from jpaged.commands.bench.workloads import Workload
from jpaged.models.dense import DenseAttention
from jpaged.models.inputs import unpaged_inputs
from jpaged.models.opening.open_checkpoint import read_config
from jpaged.models.rope import inverse_frequencies, rotation_at
from jpaged.models.weights.loading import tensor_shapes
from jpaged.sharding import device_mesh

SIZES: dict[str, dict[str, Any]] = {
    "S": {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "L": {
        "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
        "intermediate_size": 512, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
COMMON: dict[str, Any] = {
    "hidden_act": "silu", "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GGUF_KEYS = {
    "num_hidden_layers": "block_count", "max_position_embeddings": "context_length", "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "rope.dimension_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base", "vocab_size": "vocab_size",
    "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
}  # fmt: skip
"""Key of config.json → key of the metadata behind the architecture's name."""

MAX_NUM_SEQS = 16
STREAM_LEN, STREAM_OUT = 32, 64
ROWS_LEN, ROWS_OUT = 16, 32
"""Tokens of a prompt, and how many steps decode after the first token, for one stream and for 16 rows."""
GATES: dict[str, tuple[bool, float]] = {
    "one stream ÷ dense": (False, 1.25), "prompt ÷ dense": (False, 1.3), "16 rows, share of reads": (True, 0.6),
    "one stream, speed ÷ llama.cpp": (True, 1.0), "16 rows, speed ÷ llama.cpp": (True, 2.0),
}  # fmt: skip
"""Figure → whether its limit is the least, and the limit."""


def config_of(model: str, *, is_dense: bool) -> dict[str, Any]:
    """Return the content of config.json of a model or of its dense twin."""
    config = COMMON | SIZES[model]
    if not is_dense:
        return config | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    num_chosen = config.pop("num_experts_per_tok")
    del config["num_local_experts"]
    config["intermediate_size"] *= num_chosen
    return config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def write_checkpoint(directory: Path, config: dict[str, Any]) -> None:
    """Write a checkpoint of seeded weights, unless it is there.

    Matrices keep the size of what they multiply. Embeddings are large beside what layers add, so that tokens differ in
    the experts that they choose.
    """
    if (directory / "model.safetensors").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in tensor_shapes(read_config(directory), device_mesh(jax.devices()[:1])).items():
        if len(shape) == 1:
            tensors[name] = np.ones(shape, np.float32)
        else:
            size = 1 if "embed" in name else shape[-1] ** -0.5
            tensors[name] = rng.standard_normal(shape, np.float32) * np.float32(size)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def write_gguf(path: Path, config: dict[str, Any], directory: Path) -> None:
    """Write the checkpoint of a directory for llama.cpp, in float32 and without a tokenizer, unless it is there.

    Tensors of experts are one [E, out, in], and a head's two halves of queries and keys are interleaved.
    """
    if path.exists():
        return
    tensors = load_file(directory / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=True)
    for key, name in GGUF_KEYS.items():
        value = config[key]
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{name}", value)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    for name in sorted(tensors):
        if ".experts." in name and ".experts.0." not in name:
            continue
        values = tensors[name]
        if ".experts.0." in name:
            numbers = range(config["num_local_experts"])
            values = np.stack([tensors[name.replace(".experts.0.", f".experts.{e}.")] for e in numbers])
        if "q_proj" in name or "k_proj" in name:
            heads = values.reshape(-1, 2, config["head_dim"] // 2, values.shape[1])
            values = heads.swapaxes(1, 2).reshape(values.shape)
        found = names.get_name(name.replace(".experts.0.", ".experts."), (".weight",))
        assert found is not None, f"llama.cpp has no name for {name}"
        writer.add_tensor(found, np.ascontiguousarray(values))
    unfinished = path.with_suffix(".part")
    writer.write_header_to_file(unfinished)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)


def workload(name: str, num_rows: int, prompt_len: int, num_out: int, vocab_size: int) -> Workload:
    """Return equal requests of seeded tokens."""
    prompts = np.random.default_rng(7).integers(100, vocab_size, (num_rows, prompt_len)).tolist()
    return Workload(name, "", tuple(map(tuple, prompts)), (num_out,) * num_rows)


def timers(baseline: Baseline, vocab_size: int) -> dict[str, Callable[[], float]]:
    """Return what measures the seconds of each cell: a prompt, or a step that decodes."""

    def step_s(num_rows: int, prompt_len: int, num_steps: int) -> float:
        first, all_tokens = (
            baseline.run(workload("decode", num_rows, prompt_len, 1 + steps, vocab_size)) for steps in (0, num_steps)
        )
        return (all_tokens - first) / num_steps

    return {
        "prompt": lambda: baseline.run(workload("prompt", 1, 512, 1, vocab_size)),
        "one stream": lambda: step_s(1, STREAM_LEN, STREAM_OUT),
        "16 rows": lambda: step_s(MAX_NUM_SEQS, ROWS_LEN, ROWS_OUT),
    }


def chosen_experts(engine: Engine, ids_BN: np.ndarray) -> Iterator[np.ndarray]:
    """Yield, for each layer, the experts that each token of some sequences chooses: [B, N, k]."""
    weights = engine.runner.weights
    model = nnx.merge(weights.graph, weights.state)
    num_rows, length = ids_BN.shape
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids_BN.shape)
    inputs = unpaged_inputs(jnp.asarray(ids_BN.reshape(-1)), jnp.asarray(positions.reshape(-1)))
    cache, stream = DenseAttention(num_rows), model.embedded(inputs)
    (rope,) = set(model.ropes)
    rotation = rotation_at(inputs.attention.positions, inverse_frequencies(rope, model.head_size), 1.0)
    for index, layer in enumerate(model.layers):
        q, k, v = layer.before(stream, rotation, inputs)
        out, _ = cache.attend(index, q, k, v, inputs.attention, scale=model.scales[index])
        o_proj = layer.attention.o_proj.as_product(adds_to_stream=True)
        attended = layer.chain(out.reshape(stream.shape[0], -1), [o_proj], stream)
        routing = layer.mlp.router.choose(layer.mlp_norm(attended))
        yield np.asarray(routing.experts).reshape(num_rows, length, -1)
        stream = layer.after(stream, out, inputs).stream


def experts_of_steps(engine: Engine, vocab_size: int) -> float:
    """Return how many experts the rows of a decode step choose, mean of layers and of the steps that are timed."""
    requests = workload("decode", MAX_NUM_SEQS, ROWS_LEN, 1 + ROWS_OUT, vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=1 + ROWS_OUT, ignore_eos=True, detokenize=False)
    outputs = engine.generate([list(prompt) for prompt in requests.prompts], params, use_tqdm=False)
    rows = [list(output.prompt_token_ids) + list(output.outputs[0].token_ids) for output in outputs]
    ids = np.asarray(rows, np.int32)[:, : ROWS_LEN + ROWS_OUT]
    counts = [
        len(np.unique(experts[:, position]))
        for experts in chosen_experts(engine, ids)
        for position in range(ROWS_LEN, ROWS_LEN + ROWS_OUT)
    ]
    return statistics.mean(counts)


def figures(
    seconds: dict[str, dict[str, float]], expert_bytes: float, other_bytes: int, read: float
) -> dict[str, float]:
    """Return the figures of one round: what GATES names, and others; `read` is in GB/s.

    "of plain reads" is what no step of 16 rows can exceed: the speed at which its weights can be read at all.
    """
    ours = seconds["jpaged"]
    found = {f"{cell} ÷ dense": ours[cell] / seconds["dense"][cell] for cell in ours}
    found["16 rows, share of reads"] = expert_bytes / ours["16 rows"] / read / 1e9
    found["16 rows, share of reads, all weights"] = (expert_bytes + other_bytes) / ours["16 rows"] / read / 1e9
    if llama := seconds.get("llama.cpp"):
        found |= {f"{cell}, speed ÷ llama.cpp": llama[cell] / ours[cell] for cell in ours}
        of_reads = (expert_bytes + other_bytes) / read / 1e9
        found["16 rows, speed ÷ llama.cpp, of plain reads"] = llama["16 rows"] / of_reads
    return found


def medians(rounds: list[dict[str, float]], digits: int) -> dict[str, float]:
    """Return the median over rounds of each figure."""
    return {name: round(statistics.median(each[name] for each in rounds), digits) for name in rounds[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument(
        "--directory", type=Path, required=True, help="of the checkpoints, written where they are missing"
    )
    parser.add_argument("--peaks", required=True, help="command that prints the processor's peaks")
    parser.add_argument("--llama", help="command of llama.cpp as a peer, without its options; left out without it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    config, dense_config = (config_of(args.model, is_dense=is_dense) for is_dense in (False, True))
    directories = {"jpaged": args.directory / args.model, "dense": args.directory / f"{args.model}_dense"}
    write_checkpoint(directories["jpaged"], config)
    write_checkpoint(directories["dense"], dense_config)
    file = args.directory / f"{args.model}.gguf"
    if args.llama:
        write_gguf(file, config, directories["jpaged"])
    options: dict[str, Any] = {
        "dtype": "float32", "max_num_seqs": MAX_NUM_SEQS, "max_model_len": 1024, "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
    }  # fmt: skip
    rounds: list[dict[str, dict[str, float]]] = []
    peaks: list[dict[str, float]] = []
    with ExitStack() as stack:
        engines = {name: stack.enter_context(Engine(str(path), **options)) for name, path in directories.items()}
        baselines: dict[str, Baseline] = {name: RecordedEngine(engine) for name, engine in engines.items()}
        ready = None
        if args.llama:
            command = f"{args.llama} --model {shlex.quote(str(file))} --max-num-seqs {MAX_NUM_SEQS}"
            peer = stack.enter_context(closing(PeerBaseline("llama.cpp", command, MAX_NUM_SEQS)))
            baselines["llama.cpp"], ready = peer, peer.ready
        cells = {name: timers(baseline, config["vocab_size"]) for name, baseline in baselines.items()}
        for round_number in range(-1, args.rounds):  # The first round, which compiles, is not counted.
            measured = measured_peaks(args.peaks)
            seconds: dict[str, dict[str, float]] = {name: {} for name in baselines}
            for cell in ("one stream", "prompt", "16 rows"):
                for name in baselines:
                    seconds[name][cell] = cells[name][cell]()
                    print(f"{round_number}: {cell}, {name}: {1e3 * seconds[name][cell]:.2f} ms", file=sys.stderr)
            if round_number >= 0:
                peaks.append(measured)
                rounds.append(seconds)
        num_experts = experts_of_steps(engines["jpaged"], config["vocab_size"])
        bytes_of_expert = 4 * 3 * config["hidden_size"] * config["intermediate_size"]
        all_experts = config["num_hidden_layers"] * config["num_local_experts"] * bytes_of_expert
        weight_bytes = step_bytes(engines["jpaged"].runner.weights)
        device = engines["jpaged"].device
    expert_bytes = config["num_hidden_layers"] * num_experts * bytes_of_expert
    by_round = [
        figures(each, expert_bytes, weight_bytes - all_experts, measured["read"])
        for each, measured in zip(rounds, peaks, strict=True)
    ]
    found = medians(by_round, digits=3)
    missed = [
        name
        for name, (is_least, limit) in GATES.items()
        if name in found and (found[name] < limit if is_least else found[name] > limit)
    ]
    report = {
        "model": args.model,
        "config": config,
        "figures": found,
        "gates missed": missed,
        "ms": {
            name: medians([{cell: 1e3 * each for cell, each in one[name].items()} for one in rounds], digits=3)
            for name in rounds[0]
        },
        "peaks": medians(peaks, digits=3),
        "experts of a layer in a step of 16 rows": num_experts,
        "bytes of experts in a step of 16 rows": round(expert_bytes),
        "other bytes of weights in a step": weight_bytes - all_experts,
        "llama.cpp": ready,
        "rounds": args.rounds,
        "rounds of each": [
            {"seconds": each, "peaks": measured, "figures": found_then}
            for each, measured, found_then in zip(rounds, peaks, by_round, strict=True)
        ],
        **machine(device),
    }
    summary = {key: value for key, value in report.items() if key != "rounds of each"}
    print(json.dumps(summary, indent=1, ensure_ascii=False))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
