"""What transformers' beam search finds, for tests/golden/beams.json. Needs torch, transformers and the built-in model's
weights as scripts/make_peer_checkpoints.py writes them, in float32.

    python scripts/make_beam_goldens.py --model checkpoints/hf-f32 --output tests/golden/beams.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

ROOT = Path(__file__).parents[1]
MAX_TOKENS = 24
TEXTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "1, 2, 3, 4,",
    "The three primary colors are", "To be or not to be,", "import numpy as np\n", "Dear Sir or Madam,",
    "The quick brown fox", "In 1969, astronauts",
]  # fmt: skip
"""Beside the prompts of smollm2.json, nine chats and texts."""
WIDTHS = (1, 2, 4)
OTHERS = [
    {"beam_width": 4, "length_penalty": 0.0, "early_stopping": False},
    {"beam_width": 4, "length_penalty": 2.0, "early_stopping": "never"},
    {"beam_width": 3, "length_penalty": -1.0, "early_stopping": True},
]
"""Each on every fourth prompt."""


def search(model: Any, prompt: list[int], asked: dict[str, Any], eos_id: int) -> dict[str, Any]:
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=asked["beam_width"],
        num_return_sequences=asked["beam_width"],
        length_penalty=asked["length_penalty"],
        early_stopping=asked["early_stopping"],
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=eos_id,
        pad_token_id=-1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = [[token for token in row[len(prompt) :].tolist() if token >= 0] for row in found.sequences]
    if asked["beam_width"] > 1:
        scores = found.sequences_scores.tolist()
    else:  # Greedy search has no score of its own.
        steps = torch.stack([torch.log_softmax(step[0].float(), -1) for step in found.scores])
        total = steps.gather(1, torch.tensor(sequences[0])[:, None]).sum().item()
        scores = [total / len(sequences[0]) ** asked["length_penalty"]]
    return {**asked, "sequences": sequences, "scores": scores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    golden = json.loads((ROOT / "tests" / "golden" / "smollm2.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))
    prompts = [item["prompt_ids"] for item in golden["items"]]
    prompts += [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    items = []
    for number, prompt in enumerate(prompts):
        asked = [{"beam_width": width, "length_penalty": 1.0, "early_stopping": False} for width in WIDTHS]
        if number % 4 == 0:
            asked += OTHERS
        with torch.inference_mode():
            searches = [search(model, prompt, one, golden["eos_id"]) for one in asked]
        items.append({"prompt_ids": prompt, "searches": searches})
        print(f"{number + 1} of {len(prompts)}", flush=True)
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "max_tokens": MAX_TOKENS}
    args.output.write_text(json.dumps({**about, "eos_id": golden["eos_id"], "items": items}) + "\n")


if __name__ == "__main__":
    main()
