"""Checkpoints on disk (safetensors and GGUF), and how their tensors become weights."""
