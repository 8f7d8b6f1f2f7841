"""Stock verl 0.9.1 on a machine without accelerators (tests only)."""
