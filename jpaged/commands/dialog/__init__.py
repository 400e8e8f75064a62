"""The conversation of `jpaged chat`: what is typed, who answers, and what is kept of it."""
