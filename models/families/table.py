"""The table of model families: which class describes which architecture. A family's own file says everything else."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass

from ..family import ModelFamily


@dataclass(frozen=True)
class Family:
    """One architecture, under the names that files give it."""

    architecture: str
    """The transformers class, as in `architectures` of config.json."""
    model_type: str
    class_path: str
    """Module of this package, and the class in it, which is imported at its first use."""
    gguf: str | None = None
    """`general.architecture` of GGUF files of the family; None if none are read."""

    def load(self) -> type[ModelFamily]:
        """Import the family's module and return its class."""
        module, name = self.class_path.split(".")
        found: type[ModelFamily] = getattr(importlib.import_module(f".{module}", __package__), name)
        return found


FAMILIES = (
    Family("LlamaForCausalLM", "llama", "llama.Llama", gguf="llama"),
    Family("MistralForCausalLM", "mistral", "mistral.Mistral"),
    Family("MixtralForCausalLM", "mixtral", "mistral.Mixtral"),
    Family("Qwen2ForCausalLM", "qwen2", "qwen2.Qwen2", gguf="qwen2"),
    Family("Qwen3ForCausalLM", "qwen3", "qwen3.Qwen3", gguf="qwen3"),
    Family("Qwen2MoeForCausalLM", "qwen2_moe", "qwen_moe.Qwen2Moe", gguf="qwen2moe"),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", "qwen_moe.Qwen3Moe", gguf="qwen3moe"),
    Family("GptOssForCausalLM", "gpt_oss", "gpt_oss.GptOss", gguf="gpt-oss"),
    Family("Phi3ForCausalLM", "phi3", "phi3.Phi3"),
    Family("GraniteForCausalLM", "granite", "granite.Granite"),
    Family("SmolLM3ForCausalLM", "smollm3", "smollm3.SmolLM3"),
    Family("Olmo2ForCausalLM", "olmo2", "olmo.Olmo2"),
    Family("Olmo3ForCausalLM", "olmo3", "olmo.Olmo3"),
    Family("OlmoeForCausalLM", "olmoe", "olmo.Olmoe"),
    Family("Gemma2ForCausalLM", "gemma2", "gemma.Gemma2", gguf="gemma2"),
    Family("Gemma3ForCausalLM", "gemma3_text", "gemma.Gemma3", gguf="gemma3"),
    Family("GPT2LMHeadModel", "gpt2", "gpt2.GPT2"),
    Family("GPTNeoXForCausalLM", "gpt_neox", "gpt_neox.GPTNeoX"),
)
LANGUAGE_MODELS = {"Gemma3ForConditionalGeneration": "gemma3_text", "Mistral3ForConditionalGeneration": "mistral"}
"""Class of a model with images → model type of its language model, which is what is served of it. Its config is the
object `text_config` of config.json, where another model type may stand."""
LANGUAGE_MODEL_BASES = ("language_model.model.", "model.language_model.")
"""Beginnings of the names of its tensors in files of transformers 4 and 5."""
IMAGE_TENSORS = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.|rotary_emb\.inv_freq$")
"""Names of tensors in such files that are no weights of it."""
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}
BY_GGUF = {family.gguf: family for family in FAMILIES if family.gguf}


def family_class(architecture: str) -> type[ModelFamily]:
    """Return what describes the family of an architecture of the table."""
    return BY_ARCHITECTURE[architecture].load()
