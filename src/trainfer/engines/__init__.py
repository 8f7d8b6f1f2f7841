"""Who generates: implementations of ``train.rollout.engine.Engine``."""
