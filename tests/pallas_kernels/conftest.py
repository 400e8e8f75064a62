"""What of the kernels' tests a JAX can run: the GPU kernels want instructions and an interpreter of a later one."""

from jax.experimental.pallas import mosaic_gpu

collect_ignore = [] if hasattr(mosaic_gpu, "InterpretGPUParams") else ["test_gpu_attention.py", "test_gpu_check.py"]
