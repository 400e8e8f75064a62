"""Names of the backends, for those who must not wait for JAX to be imported."""

BACKEND_NAMES = ("xla",)
UNBUILT_BACKENDS = ("pallas-tpu", "pallas-gpu")
"""They take the same place behind `Backend`, and are refused by name until they are built."""
