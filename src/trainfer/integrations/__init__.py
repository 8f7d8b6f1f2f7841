"""Other people's systems: one folder each, none imports another."""
