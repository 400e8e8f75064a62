"""Runs over a file of prompts: its lines, the jobs that they ask for, their results, and how a later run goes on."""
