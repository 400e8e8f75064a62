"""Clients of the core: named calls, plain values and streams of outputs, wherever the core computes. Loads no JAX."""
