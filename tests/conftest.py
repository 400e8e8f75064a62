"""Every test runs JAX strictly: no silent dtype or rank promotion."""

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
