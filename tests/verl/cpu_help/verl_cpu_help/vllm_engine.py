"""vLLM's CPU engine keeps packed copies of weights, which verl's stock sync (``model.load_weights``) cannot reach.

Without oneDNN it computes with the parameters themselves. ``VERL_CPU_FAULT`` plants a fault in the workers.
"""

from verl_cpu_help.faults import plant_in_engine


def register():
    import vllm._custom_ops as ops

    ops._supports_onednn = False
    plant_in_engine()
