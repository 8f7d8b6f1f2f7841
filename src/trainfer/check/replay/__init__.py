"""Runs modules again in high precision on each side's own inputs: what a side introduced, and what it inherited."""
