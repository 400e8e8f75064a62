"""Runs one engine after another over virtual devices of a CPU, and prints as JSON what each has drawn.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python -m tests.jpaged.mesh_engine DIRECTORY BUCKETS KV_CACHE_DTYPE TENSOR_PARALLEL_SIZE[e][t]…

An e stands for whole experts on each device, and a t for weights that are stored as on TPUs.
BUCKETS are `make_buckets`, or fewer, which take less time to compile: `fewest_buckets` or `one_mode`.
The requests are the same for each: greedy and drawn samples, logprobs, penalties, structured output, a fork and beams,
with prompts in chunks beside each other, sequences that lose their pages by swap and by recompute, and a prompt that
comes again.
"""

import json
import sys
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import jax
from safetensors.numpy import load_file

from jpaged import BeamSearchParams, Engine, SamplingParams
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
from jpaged.pallas_kernels.tpu_ops import TPU_OPS
from jpaged.scheduling.buckets import make_buckets
from jpaged.scheduling.preemption import PreemptionMode, PreemptionPolicy
from jpaged.step import step_sizes

from .fewest_buckets import fewest_buckets, one_mode

SIZES: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 16, "long_prefill_token_threshold": 12, "block_size": 4,
    "max_model_len": 64, "num_blocks": 513, "num_host_blocks": 513, "warmup": "off",
}  # fmt: skip
UPDATED = (2, 8)
"""Numbers of devices whose engines get their weights once more, as a trainer's."""
BUCKETS = {make.__name__: make for make in (make_buckets, fewest_buckets, one_mode)}
GREEDY = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, output_kind="final_only")
DRAWN = replace(GREEDY, temperature=0.8, seed=7, n=3, max_tokens=10, logprobs=2, prompt_logprobs=1)
ASKED = {"type": "array", "items": {"enum": ["a", "b c", 7]}, "minItems": 2, "maxItems": 3}
RULED = replace(GREEDY, max_tokens=10, repetition_penalty=1.5, presence_penalty=0.5, logit_bias={5: 2.0}, min_tokens=3)


def draw(engine: Engine, tokens: list[int]) -> dict[str, Any]:
    """Return the tokens of every request by its id, and the logprobs of the drawn ones."""
    requests = {
        "48": ([*tokens[:48]], replace(GREEDY, max_tokens=16)),
        "52": ([*tokens[:52]], replace(GREEDY, max_tokens=12)),
        "again": ([*tokens[:48]], replace(GREEDY, max_tokens=16)),
        "drawn": ([*tokens[:30]], DRAWN),
        "ruled": ([*tokens[:21]], RULED),
    }
    if engine.tokenizer is not None:
        structured = replace(DRAWN, n=2, max_tokens=30, logprobs=None, structured_outputs={"json": ASKED})
        requests["structured"] = [*tokens[:17]], structured
    for name, (prompt, params) in requests.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    found, modes = {}, cycle((PreemptionMode.SWAP, PreemptionMode.RECOMPUTE))
    for step in count(1):
        for output in engine.step():
            found[output.request_id] = [list(sample.token_ids) for sample in output.outputs]
            if output.request_id == "drawn":
                found["logprobs"] = [
                    [at[token].logprob for token, at in zip(sample.token_ids, sample.logprobs, strict=True)]
                    for sample in output.outputs
                ]
        if not engine.has_unfinished_requests():
            break
        if step % 3 == 0 and engine.scheduler.running:
            engine.scheduler.preemption = PreemptionPolicy(next(modes))
            engine.scheduler.preempt(engine.scheduler.running[-1])
    beams = engine.beam_search([tokens[:20]], BeamSearchParams(beam_width=3, max_tokens=6))
    found["beams"] = [list(sample.token_ids) for sample in beams[0].outputs]
    # Undisturbed, so that several tokens are decoded in one dispatch.
    params = replace(GREEDY, max_tokens=16)
    found["alone"] = [list(output.outputs[0].token_ids) for output in engine.generate([tokens[:48]], params)]
    return found


def main() -> None:
    directory, kv_cache_dtype = Path(sys.argv[1]), sys.argv[3]
    step_sizes.make_buckets = BUCKETS[sys.argv[2]]
    tokens = load_file(directory / "golden.safetensors")["tokens"].tolist()
    for size in sys.argv[4:]:
        num_devices = int(size.rstrip("et"))
        devices: dict[str, Any] = {"enable_expert_parallel": "e" in size, "tensor_parallel_size": num_devices}
        if "t" in size:
            devices["attention_backend"], XlaBackend.layer_ops = "xla", TPU_OPS
        if num_devices == 2:  # A mesh of the caller's own devices.
            devices["tensor_parallel_size"] = None
            devices["mesh"] = jax.make_mesh((1, 2), ("data", "tensor"), devices=jax.devices()[6:])
        has_tokenizer = (directory / "tokenizer.json").is_file()
        has_experts = "num_local_experts" in json.loads((directory / "config.json").read_text())
        options = {**SIZES, **devices, "kv_cache_dtype": kv_cache_dtype, "skip_tokenizer_init": not has_tokenizer}
        options["count_expert_tokens"] = has_experts
        with Engine(str(directory), **options) as engine:
            found, stats = draw(engine, tokens), engine.stats()
            if num_devices in UPDATED:  # The same weights once more, from a tree: padded and split on the devices.
                own = jax.tree.map(jax.numpy.copy, engine.params)
                for tree in (load_file(directory / "model.safetensors"), own):
                    engine.update_params(tree)
                    assert draw(engine, tokens) == found
                stats["recompiles"] = engine.stats()["recompiles"]
            held, first = [], engine.mesh.devices.flat[0].id
            for tree in (engine.params, engine.runner.state.cache.pages):
                shards = (array.addressable_shards[0] for array in jax.tree.leaves(tree))
                held.append(sum(shard.data.nbytes for shard in shards))
            planned = [engine.sizes.memory.weights_bytes, engine.sizes.memory.pool_bytes]
        counts = {name: stats[name] for name in ("preemptions_swap", "preemptions_recompute", "recompiles")}
        if has_experts:
            found["expert_tokens"] = stats["expert_tokens"]
        sizes_found = {"first": first, "held": held, "planned": planned, "hits": stats["prefix_cache_hits"]}
        print(json.dumps({**sizes_found, **counts, **found}))


if __name__ == "__main__":
    main()
