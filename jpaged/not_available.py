"""Names of vLLM's full interface that this version does not have, each refused by name.

A version that adds one of them removes it here. What is not supported in a checkpoint is refused by `models`.
"""

from __future__ import annotations

ENGINE_OPTIONS = (
    "enforce_eager",
    "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "speculative_config", "limit_mm_per_prompt",
    "served_model_name", "disable_log_stats", "stat_loggers", "otlp_traces_endpoint",
)  # fmt: skip
PROMPT_KEYS = ("multi_modal_data", "lora_request", "documents")
FLAGS = (
    *ENGINE_OPTIONS, "lora", "image", "trace",
)  # fmt: skip
"""Flags of `jpaged generate`, written as the names of their options."""
LINE_KEYS = (*FLAGS, *PROMPT_KEYS)
"""Keys of a line of a prompt file."""
SERVE_OPTIONS = (
    "data_parallel_size_local", "api_server_count", "enable_lora", "lora_modules", "trust_request_chat_template",
    "ssl_ca_certs", "ssl_cert_reqs", "uvicorn_log_level",
)  # fmt: skip
"""Options of `jpaged serve`."""
WAYS_OUT = {
    "data_parallel_size_local": "give --data-parallel-size, the cores on this machine",
    "api_server_count": "give --core process, and --data-parallel-size for more cores",
}
"""What does the same as some of these names, or as much of it as there is."""
ROUTES = (
    "/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank",
    "/classify", "/pooling", "/v1/audio/transcriptions", "/v1/images/generations", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)  # fmt: skip
"""Paths of vLLM's server."""
COMMANDS = ("plan", "doctor", "trace")
BENCHES: tuple[str, ...] = ()
EXPORTS = ("LoRARequest", "PoolingParams")
"""Names in the Python package `jpaged`."""
