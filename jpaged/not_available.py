"""Names of vLLM's full interface that this version does not have, each refused by name.

A version that adds one of them removes it here. What is not supported in a checkpoint is refused by `models`.
"""

from __future__ import annotations

ENGINE_OPTIONS = (
    "quantization", "enforce_eager",
    "enable_expert_parallel",
    "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "speculative_config", "limit_mm_per_prompt",
    "served_model_name", "disable_log_stats", "stat_loggers", "otlp_traces_endpoint",
)  # fmt: skip
PROMPT_KEYS = ("multi_modal_data", "lora_request")
FLAGS = (
    *ENGINE_OPTIONS, "lora", "image", "trace",
)  # fmt: skip
"""Flags of `jpaged generate`, written as the names of their options."""
LINE_KEYS = (*FLAGS, *PROMPT_KEYS)
"""Keys of a line of a prompt file."""
COMMANDS = ("chat", "serve", "batch", "plan", "doctor", "trace")
BENCHES = ("serve",)
EXPORTS = ("AsyncEngine", "LoRARequest", "PoolingParams")
"""Names in the Python package `jpaged`."""
