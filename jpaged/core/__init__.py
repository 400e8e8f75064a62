"""The host core: steps of a scheduler on a runner, and the loop that drives them."""
