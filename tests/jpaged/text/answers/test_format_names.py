"""Names of formats, and which one each chat template has."""

import pytest

from jpaged.errors import ConfigError
from jpaged.text.answers.format_names import (
    CALL_ALIASES,
    CALL_FORMATS,
    THOUGHT_ALIASES,
    THOUGHT_FORMATS,
    answer_format,
    call_format_name,
    detect_calls,
    detect_thought,
    find_format,
    thought_format_name,
)

from ..tokenizing.published_tokenizers import byte_tokenizer, llama_cpp_models

FOUND = {
    "Apertus-8B-Instruct": (None, None),
    "Apriel-1.6-15b-Thinker-fixed": ("minimax", None),
    "Bielik-11B-v3.0-Instruct": ("hermes", "qwen3"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "Cohere2MoE": (None, "cohere"),
    "CohereForAI-c4ai-command-r-plus-tool_use": (None, None),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": (None, "cohere"),
    "GLM-4.6": ("glm47", "qwen3"),
    "GLM-4.7-Flash": ("glm47", "qwen3"),
    "GigaChat3-10B-A1.8B": (None, None),
    "GigaChat3.1-10B-A1.8B": (None, None),
    "HuggingFaceTB-SmolLM3-3B": (None, "qwen3"),
    "Kimi-K2-Instruct": (None, None),
    "Kimi-K2-Thinking": (None, "qwen3"),
    "Kimi-K3": (None, None),
    "LFM2-8B-A1B": (None, None),
    "LFM2.5-8B-A1B": (None, "qwen3"),
    "LFM2.5-Instruct": (None, "qwen3"),
    "MiMo-VL": ("hermes", None),
    "MiniMax-M1": ("minimax", None),
    "MiniMax-M2": ("minimax_m2", "qwen3"),
    "MiniMax-M3": (None, None),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "qwen3"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron_json", "qwen3"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "Reka-Edge": ("hermes", "qwen3"),
    "Spark2.5": ("glm47", "qwen3"),
    "StepFun3.5-Flash": ("qwen3_coder", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (None, "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (None, "qwen3"),
    "deepseek-ai-DeepSeek-V3.1": (None, "qwen3"),
    "deepseek-ai-DeepSeek-V3.2": (None, "qwen3"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": (None, "qwen3"),
    "deepseek-ai-DeepSeek-V4": (None, "qwen3"),
    "fireworks-ai-llama-3-firefunction-v2": (None, None),
    "google-gemma-2-2b-it": (None, None),
    "google-gemma-4-31B-it-interleaved": ("gemma4", "gemma4"),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "ibm-granite-granite-4.1": ("hermes", None),
    "inclusionai-ling-3.0-flash": ("glm47", "qwen3"),
    "llama-cpp-deepseek-r1": (None, "qwen3"),
    "llama-cpp-rwkv-world": (None, "qwen3"),
    "meetkai-functionary-medium-v3.1": (None, None),
    "meetkai-functionary-medium-v3.2": (None, None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "moonshotai-Kimi-K2": (None, None),
    "muse-glimmer": (None, None),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "openbmb-MiniCPM5-1B": (None, "qwen3"),
    "poolside-Laguna-S-2.1": ("glm47", "qwen3"),
    "poolside-Laguna-XS-2.1": ("glm47", "qwen3"),
    "poolside-Laguna-XS.2": ("glm47", "qwen3"),
    "tencent-Hy3": (None, None),
    "unsloth-Apriel-1.5": ("minimax", None),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
    "upstage-Solar-Open-100B": (None, None),
}
"""Template → its formats of calls and of thoughts."""


def test_the_formats_of_templates_are_found():
    folder = llama_cpp_models() / "templates"
    templates = {path.stem: path.read_text() for path in folder.glob("*.jinja")}
    found = {name: (detect_calls(text), detect_thought(text, lambda mark: False)) for name, text in templates.items()}
    assert found == FOUND
    for calls, thought in FOUND.values():
        answer_format(calls, thought)


def test_a_tokenizer_with_the_end_of_a_thought_thinks():
    assert detect_thought("", lambda mark: mark == "</think>") == "qwen3"


def test_names_of_vllm_lead_to_formats():
    assert {call_format_name(name) for name in CALL_ALIASES} <= set(CALL_FORMATS)
    assert {thought_format_name(name) for name in THOUGHT_ALIASES} <= set(THOUGHT_FORMATS)
    assert call_format_name("qwen3_xml") == "qwen3_coder"
    assert thought_format_name("deepseek_r1") == "qwen3"
    assert call_format_name("none") is None
    assert answer_format(None, None).marks == ()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hermess", "hermess: unknown format, as --tool-call-parser takes it; did you mean hermes?"),
        ("kimi_k2", "kimi_k2: not available in this version; allowed: hermes, qwen3_coder"),
    ],
)
def test_other_names_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        call_format_name(name)


def test_channels_go_with_nothing_else():
    with pytest.raises(ConfigError, match=r"^tool_call_parser: got openai with the reasoning parser qwen3, allowed: "):
        answer_format("openai", "qwen3")


def test_a_response_template_tells_where_the_chat_template_does_not():
    tokenizer = byte_tokenizer()
    fields = {
        "thinking": {"open": "<why>", "close": "</why>"},
        "tool_calls": {
            "open": "<do>",
            "close": "</do>",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    }
    assert find_format("", tokenizer) is None
    tokenizer.response_template = {"fields": fields}
    found = find_format("", tokenizer)
    assert (found.format.thought.open, found.format.calls.open) == ("<why>", "<do>")
    assert find_format("<think></think>", tokenizer).format.thought.open == "<think>"
    assert find_format("", tokenizer, call_parser="hermes").format.calls.open == "<tool_call>"
    assert find_format("", tokenizer, call_parser="none", reasoning_parser="none") is None
    tokenizer.response_template = {"fields": {}}
    with pytest.raises(ConfigError, match=r"response_template\.fields: is missing or empty"):
        find_format("", tokenizer)
