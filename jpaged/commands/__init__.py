"""The command line: `jpaged generate`, `bench`, `tune`; flags, input files and output files."""
