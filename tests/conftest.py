"""Every test runs JAX strictly: no silent dtype or rank promotion, and array annotations hold when a function runs."""

import os

import jax
from hypothesis import settings
from jaxtyping import install_import_hook

# Before any of them is imported. Shapes are checked while a step is traced, so a compiled step costs nothing more.
# Not the modules that define pytrees: JAX builds those from shapes and from numpy arrays too.
_CHECKED = ("models.layers", "models.llama", "models.rope", "pallas_kernels.ragged_paged_attention.xla")
install_import_hook([f"jpaged.{name}" for name in _CHECKED], typechecker="beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A push is judged on the same examples each time; people and the slow runs search on.
settings.register_profile("ci", derandomize=True, database=None)
if os.environ.get("CI"):
    settings.load_profile("ci")
