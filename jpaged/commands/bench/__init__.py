"""`jpaged bench`: measure. Whole workloads beside other engines, the scheduler alone, kernels alone; also the tuner."""
