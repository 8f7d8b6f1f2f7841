"""Batch arithmetic: config -> integers. No tensor, no torch, nothing expensive."""
