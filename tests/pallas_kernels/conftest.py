"""What of the kernels' tests a JAX can run: the GPU kernels want instructions that Pallas has since jax 0.11."""

from jax.experimental.pallas import mosaic_gpu

collect_ignore = [] if hasattr(mosaic_gpu, "InterpretGPUParams") else ["test_gpu_attention.py"]
