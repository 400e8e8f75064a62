"""Makes tests/golden/beams.json: what transformers' beam search finds with the built-in model in float32.

Needs torch, transformers, and the model's weights as scripts/make_peer_checkpoints.py writes them.

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
"""Prompts in addition to the nine chats and texts of smollm2.json."""
WIDTHS = (1, 2, 4)
MORE_PARAMS = [
    {"beam_width": 4, "length_penalty": 0.0, "early_stopping": False},
    {"beam_width": 4, "length_penalty": 2.0, "early_stopping": "never"},
    {"beam_width": 3, "length_penalty": -1.0, "early_stopping": True},
]
"""Searches that are added for every fourth prompt."""


def search(model: Any, prompt: list[int], params: dict[str, Any], eos_id: int) -> dict[str, Any]:
    """Return `params` with the token ids and the scores of the beams found, best first."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params["beam_width"],
        num_return_sequences=params["beam_width"],
        length_penalty=params["length_penalty"],
        early_stopping=params["early_stopping"],
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=eos_id,
        pad_token_id=-1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = [[token for token in row[len(prompt) :].tolist() if token >= 0] for row in found.sequences]
    if params["beam_width"] > 1:
        scores = found.sequences_scores.tolist()
    else:  # transformers returns no score for a greedy search.
        steps = torch.stack([torch.log_softmax(step[0].float(), -1) for step in found.scores])
        total = steps.gather(1, torch.tensor(sequences[0])[:, None]).sum().item()
        scores = [total / len(sequences[0]) ** params["length_penalty"]]
    return {**params, "sequences": sequences, "scores": scores}


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
        all_params = [{"beam_width": width, "length_penalty": 1.0, "early_stopping": False} for width in WIDTHS]
        if number % 4 == 0:
            all_params += MORE_PARAMS
        with torch.inference_mode():
            searches = [search(model, prompt, params, golden["eos_id"]) for params in all_params]
        items.append({"prompt_ids": prompt, "searches": searches})
        print(f"{number + 1} of {len(prompts)}", flush=True)
    header = {"torch": torch.__version__, "transformers": transformers.__version__, "max_tokens": MAX_TOKENS}
    args.output.write_text(json.dumps({**header, "eos_id": golden["eos_id"], "items": items}) + "\n")


if __name__ == "__main__":
    main()
