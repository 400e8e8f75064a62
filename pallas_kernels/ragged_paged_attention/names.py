"""Names of the backends, for those who must not wait for JAX to be imported."""

BACKEND_NAMES = ("xla", "pallas-tpu")
UNBUILT_BACKENDS = ("pallas-gpu",)
"""They take the same place behind `Backend`, and are refused by name until they are built."""
