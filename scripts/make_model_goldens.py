"""Makes tests/golden/<name>.json: greedy tokens and perplexity of a real model, by transformers with torch in float32.

    pip install torch==2.13.0 -e .
    python scripts/make_model_goldens.py qwen2.5-coder-0.5b Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf

The weights are those of a GGUF file, de-quantized to float32, so both sides compute with the same numbers. An item
holds the ids of a prompt, of its greedy continuation, and by how much the likeliest token leads in front of each.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers

from jpaged.models.families.table import BY_ARCHITECTURE
from jpaged.models.opening.gguf_checkpoint import GGUFCheckpoint
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.text.chat.chat_template import render_chat
from jpaged.text.tokenizing.tokenizer import load_tokenizer

NUM_OUTPUTS = 64
CHATS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is the capital of France?",
    "Explain in two sentences what a hash table is.",
    "Translate to German: The weather is nice today.",
    "List three prime numbers above 100.",
)
TEXTS = (
    "def quicksort(items):\n",
    "The three laws of motion were first stated by",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "#include <stdio.h>\n\nint main(void) {\n",
    "Once upon a time, in a village at the foot of a mountain,",
)
PASSAGE = (
    "A cache keeps copies of what was fetched or computed before, so that the next request for it is served faster. "
    "It works because programs ask for the same things again: a page that was read a moment ago is likely to be read "
    "once more, and its neighbours with it. What a cache may hold is bounded, and when it is full, something must go. "
    "The usual rule drops the entry that was used least recently. The rule is simple, cheap to follow, and wrong only "
    "for programs that sweep through more data than fits: these evict each entry just before it would have been used. "
    "Two numbers describe how well a cache does its work. The hit rate says how often it had what was asked for, and "
    "the cost of a miss says how much is lost when it had not. A small cache close to the processor and a large one "
    "further away, each with costs of its own, together come near to a memory that is both large and fast."
)


def load_model(checkpoint: GGUFCheckpoint, config: Any) -> Any:
    """Return the model of transformers with the checkpoint's weights in float32."""
    model_type = BY_ARCHITECTURE[config.architecture].model_type
    theirs = transformers.AutoConfig.for_model(model_type, **config.source, attn_implementation="eager")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs, dtype=torch.float32)
    tensors = {name: torch.from_numpy(checkpoint.read(name, slice(None)).copy()) for name in checkpoint.names()}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    for module in model.modules():  # Not in the checkpoint, so still without memory.
        if hasattr(module, "inv_freq"):
            module.__init__(theirs)
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model.eval()


@torch.no_grad()
def greedy(model: Any, prompt_ids: list[int], stop_ids: set[int]) -> dict[str, Any]:
    """Return an item: the continuation up to a stop id, and the lead of each of its tokens."""
    ids, output_ids, margins, cache = torch.tensor([prompt_ids]), [], [], None
    while len(output_ids) < NUM_OUTPUTS and not (output_ids and output_ids[-1] in stop_ids):
        step = model(ids, past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        first, second = step.logits[0, -1].topk(2).values.tolist()
        output_ids.append(int(step.logits[0, -1].argmax()))
        margins.append(first - second)
        ids = torch.tensor([output_ids[-1:]])
    return {"prompt_ids": prompt_ids, "output_ids": output_ids, "margins": [round(margin, 5) for margin in margins]}


@torch.no_grad()
def perplexity(model: Any, ids: list[int]) -> float:
    """Return exp of the mean negative log-probability of each token but the first."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].double()
    return math.exp(float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("gguf", type=Path)
    args = parser.parse_args()
    config, checkpoint = open_checkpoint(args.gguf)
    assert isinstance(checkpoint, GGUFCheckpoint), "wanted a GGUF file"
    tokenizer, model = load_tokenizer(args.gguf, checkpoint.file), load_model(checkpoint, config)
    chats = [render_chat(tokenizer, [{"role": "user", "content": text}]) for text in CHATS]
    prompts = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    prompts += [tokenizer.encode(text) for text in TEXTS]
    items = []
    for prompt in prompts:
        items.append(greedy(model, prompt, set(config.eos_token_ids)))
        print(f"{len(items[-1]['output_ids'])} tokens, smallest lead {min(items[-1]['margins']):.4f}", flush=True)
    passage = tokenizer.encode(PASSAGE)
    found = {
        "checkpoint": args.gguf.name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "items": items,
        "passage_ids": passage,
        "perplexity": perplexity(model, passage),
    }
    path = Path(__file__).parents[1] / "tests" / "golden" / f"{args.name}.json"
    path.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    print(f"{path}: perplexity {found['perplexity']:.4f}")


if __name__ == "__main__":
    main()
