"""A model that runs -> captured rows."""
