"""An engine that answers from a list: for tests of the whole loop without a model."""
