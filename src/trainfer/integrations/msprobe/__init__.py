"""Read and write msProbe dumps."""
