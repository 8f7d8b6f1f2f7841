"""TRL's GRPOTrainer: ``callback.CaptureCallback`` captures what chosen steps generate and score, and compares the two.

Nothing of TRL is imported: a callback is given the model and the arguments, and that is enough.
"""
