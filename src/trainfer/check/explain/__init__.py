"""Differences -> causes. Plain Python."""
