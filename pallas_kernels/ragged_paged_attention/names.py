"""Names of the backends, for those who must not wait for JAX to be imported."""

BACKEND_NAMES = ("xla", "pallas-tpu", "pallas-gpu")
