"""Types of configuration fields, with their ranges, and the one base of all sections.

Leaves out: what a key means (each section says that) and rules over several keys (the planner, ``load``).
"""

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
CountOrAll = Annotated[int, msgspec.Meta(ge=-1)]
"""-1 stands for all of them, or for never, as the key says."""
Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
ShareBelowAll = Annotated[float, msgspec.Meta(ge=0, lt=1)]
PositiveShare = Annotated[float, msgspec.Meta(gt=0, le=1)]
Seed = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Texts = Annotated[tuple[Text, ...], msgspec.Meta(min_length=1)]

DType = Literal["float32", "bfloat16", "fp32", "bf16"]
LONG_DTYPES: dict[str, Literal["float32", "bfloat16"]] = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
"""verl writes both spellings; a configuration that was built holds the long one."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: frozen, by keyword, no unknown keys."""

    def _resolve(self, name: str, value: object) -> None:
        """Fill in, at construction, a field whose default follows another field."""
        msgspec.structs.force_setattr(self, name, value)
