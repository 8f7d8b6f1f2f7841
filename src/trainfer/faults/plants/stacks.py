"""Two and three causes at once: the first must be found, and the search must go on."""

from collections.abc import Sequence

from trainfer.faults.fault import Fault, Plant
from trainfer.faults.pair import Pair
from trainfer.faults.plants import attention, execution, head, kv_cache, logprob, norm, rope
from trainfer.faults.records import Expected


def stacked(*plants: Plant) -> Plant:
    """All of them, in the order in which a comparison should list them."""

    def plant(pair: Pair) -> Sequence[Expected]:
        return [expected for one in plants for expected in one(pair)]

    return plant


_ROLLOUT = ("rollout",)
_FLOAT = ("float32",)
FAULTS = (
    Fault(
        name="stack.three/servicenow", sides=_ROLLOUT, dtypes=_FLOAT, magnitudes=(0.1, 0.3, 0.2, 0.05, 0.4),
        plant=stacked(kv_cache.plant_stale_prefix, head.plant_precision, logprob.plant_raw),
        summary="a stale prefix, a head in bfloat16 and raw log-probs at temperature 1 − size, as one team met them",
    ),
    Fault(
        name="stack.two/rope_norm", magnitudes=(1e-2, 1e-3, 3e-2, 3e-3, 1e-4),
        plant=stacked(rope.plant_attention_factor, norm.plant_eps), dtypes=_FLOAT,
        summary="YaRN's factor missing, and one norm's eps",
    ),
    Fault(
        name="stack.two/window_head", plant=stacked(attention.plant_window_ignored, head.plant_precision), dtypes=_FLOAT,
        architectures=("gemma2",), summary="Gemma-2's window ignored, and a head in bfloat16",
    ),
    Fault(
        name="stack.two/softmax_temperature", dtypes=_FLOAT, magnitudes=(0.4, 0.2, 0.1, 0.02, 0.3),
        plant=stacked(attention.plant_weights_in_bf16, logprob.plant_raw),
        summary="a softmax in bfloat16, and raw log-probs at temperature 1 − size",
    ),
    Fault(
        name="stack.two/cache_filter", sides=_ROLLOUT, dtypes=_FLOAT, magnitudes=(0.8, 0.9, 0.95, 0.85, 0.7),
        plant=stacked(kv_cache.plant_fp8, logprob.plant_top_p), summary="a cache in float8, and log-probs of the nucleus",
    ),
    Fault(
        name="stack.three/rope_unknown_head", magnitudes=(1e-2, 1e-3, 3e-2, 3e-3, 0.1), dtypes=_FLOAT,
        plant=stacked(rope.plant_table_in_bf16, execution.plant_scaled_mlp, head.plant_precision),
        summary="a rotary table in bfloat16, one MLP times 1 + size, and a head in bfloat16",
    ),
)  # fmt: skip
