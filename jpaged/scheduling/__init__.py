"""The scheduler: it decides which requests compute which tokens next, and moves requests from state to state."""
