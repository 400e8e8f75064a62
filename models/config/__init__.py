"""Configs: what config.json and GGUF metadata say of a model, checked, and what an engine reads of it."""
