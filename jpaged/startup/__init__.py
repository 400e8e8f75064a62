"""From options to a running engine: find and open a model, size the pool, choose the attention backend, compile."""
