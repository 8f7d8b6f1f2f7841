"""Faults that come together.

Takes a pair; plants two faults of this package on one side, the one nearer to the input first.
"""

from trainfer.faults.fault import Fault
from trainfer.faults.models import layer_name
from trainfer.faults.pair import Pair
from trainfer.faults.records import Expected
from trainfer.faults.second import heads, norms, positions, scoring

EPS = 1e-3


def plant_clamp_and_hidden(pair: Pair) -> list[Expected]:
    """Positions end at seven, and the head is handed bfloat16."""
    return [*positions.plant_clamped(pair), *heads.plant_hidden(pair)]


def plant_eps_and_min_tokens(pair: Pair) -> list[Expected]:
    """One norm's eps, and processed log-probs."""
    name = f"{layer_name(pair.clean, 0)}.input_layernorm"
    pair.find(name).variance_epsilon = EPS
    return [Expected(cause="norm.eps", modules=(name,)), *scoring.plant_min_tokens(pair)]


def plant_root_and_times(pair: Pair) -> list[Expected]:
    """One norm's root in bfloat16, and log-probs that are multiplied by the temperature."""
    return [*norms.plant_root(pair), *scoring.plant_times(pair)]


FAULTS = (
    Fault(
        name="stack.two/clamp_hidden", plant=plant_clamp_and_hidden, dtypes=("float32",),
        summary="positions end at seven, and the head is handed bfloat16",
    ),
    Fault(
        name="stack.two/eps_min_tokens", plant=plant_eps_and_min_tokens, sides=("rollout",),
        summary="the first norm's eps is 1e-3, and the end is masked before the softmax",
    ),
    Fault(
        name="stack.two/root_times", plant=plant_root_and_times, dtypes=("float32",), magnitudes=(0.4, 0.1),
        summary="one norm's root in bfloat16, and log-probs times the temperature 1 − size",
    ),
)  # fmt: skip
