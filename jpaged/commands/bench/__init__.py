"""Benches: whole workloads beside other engines, the scheduler alone, kernels alone, and kernel tuning."""
