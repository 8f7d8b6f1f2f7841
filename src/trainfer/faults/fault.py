"""A fault and a control, as the catalogue lists them.

Takes records and a ``Pair``; gives what can be planted, and what must raise no alarm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainfer.faults.pair import Pair
from trainfer.faults.records import Answer, Expected

Plant = Callable[[Pair], Sequence[Expected]]
"""Changes a pair of sides that agree into one that does not; says what a comparison should find, first cause first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One way in which a cause happens."""

    name: str
    """``norm.eps/attribute``: the cause, and the way."""
    plant: Plant
    summary: str
    """What is changed, in one sentence for ``docs/faults.md``."""
    sides: tuple[str, ...] = ("rollout", "train")
    architectures: tuple[str, ...] = ("qwen2", "qwen3", "llama")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    magnitudes: tuple[float, ...] = ()
    """From large to the noise floor; none where a fault is there or not. Seeds walk through them."""
    layouts: tuple[str, ...] = ("right", "left", "packed")

    @property
    def cause(self) -> str:
        """Its id; of a stack ``stack.two`` or ``stack.three``."""
        return self.name.partition("/")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """A pair that differs in shape, order or policy and in nothing else; N1 to N12."""

    name: str
    summary: str
    run: Callable[[int, str], Answer]
    """Seed and folder -> what the comparison said."""
    allowed: tuple[str, ...] = ()
    """Causes besides ``shape.*`` that are no alarm; N12 alone has one."""
