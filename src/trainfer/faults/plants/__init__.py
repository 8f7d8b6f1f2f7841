"""Ways to plant each cause, one module per family."""
