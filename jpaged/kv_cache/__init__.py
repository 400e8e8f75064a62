"""Pages of keys and values: pools, page tables, prefix cache, samples that share pages."""
