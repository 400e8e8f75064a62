"""Opens a checkpoint and reads its config: the one room that knows formats, weights and families."""
