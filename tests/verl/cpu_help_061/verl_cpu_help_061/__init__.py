"""Stock verl 0.6.1 on a machine without accelerators (tests only)."""
