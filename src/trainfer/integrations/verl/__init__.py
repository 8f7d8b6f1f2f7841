"""Attach the probe to a stock verl run."""
