"""Data in and out: rows, prompts, completions, results."""
