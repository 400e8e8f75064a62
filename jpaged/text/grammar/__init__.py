"""What an output must look like: schemas, expressions and grammars, as masks of the tokens that may come next."""
