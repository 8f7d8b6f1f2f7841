"""What a checkpoint of an adapter says about it: PEFT's configuration, the scalings, and the base that it belongs to.

A checkpoint of an adapter holds the adapter's parameters and their optimizer state alone. The base is named by its
folder and known by the fingerprint of each of its weights, so an adapter is never put on another base unnoticed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trainfer.errors import CheckpointError
from trainfer.train.update.adapter import AdapterLayout

_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredAdapter:
    """The entry ``adapter`` of ``training_state.json``."""

    layout: AdapterLayout
    base: Mapping[str, str]
    """Fingerprint of each frozen weight, in the master format, under its name in a model without adapter."""

    @classmethod
    def of(cls, layout: AdapterLayout, base: Mapping[str, str]) -> "StoredAdapter":
        """Of a model in memory."""
        return cls(layout=layout, base=base)

    @classmethod
    def from_json(cls, entry: object) -> "StoredAdapter":
        """Inverse of ``to_json``.

        Raises:
            CheckpointError: not such an entry.
        """
        if isinstance(entry, dict):
            scalings, config, folder, base = (
                entry.get(name) for name in ("scalings", "config", "base_folder", "base")
            )
            if (
                isinstance(scalings, dict)
                and all(isinstance(value, int | float) for value in scalings.values())
                and isinstance(config, dict)
                and isinstance(folder, str)
                and isinstance(base, dict)
                and all(isinstance(value, str) for value in base.values())
            ):
                layout = AdapterLayout(scalings=scalings, config=config, base_folder=folder)
                return cls(layout=layout, base=base)
        raise CheckpointError(
            "The entry `adapter` of the checkpoint's training_state.json is damaged. Use an older one."
        )

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "scalings": dict(self.layout.scalings),
            "config": dict(self.layout.config),
            "base_folder": self.layout.base_folder,
            "base": dict(self.base),
        }


def check_adapter(stored: StoredAdapter | None, own: StoredAdapter | None, *, where: str) -> None:
    """Raise unless a checkpoint's adapter is that of the model which is to be restored.

    Raises:
        CheckpointError: only one of them has an adapter, a scaling differs, or the base is another one.
    """
    if stored is None and own is None:
        return
    if stored is None or own is None:
        held, wanted = ("the whole model", "an adapter") if stored is None else ("an adapter", "all weights")
        raise CheckpointError(
            f"{where} holds {held}, but this run trains {wanted} (actor_rollout_ref.model.lora_rank). Resume with the value "
            "that was saved, or start in another folder."
        )
    ours, theirs = own.layout.scalings, stored.layout.scalings
    scaled = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    if scaled:
        raise CheckpointError(
            f"{where}: the adapter of {scaled[0]} is scaled by {theirs[scaled[0]]:g} there and by {ours[scaled[0]]:g} here "
            "(actor_rollout_ref.model.lora_alpha / lora_rank). Resume with the values that were saved."
        )
    check_base(stored, own.base, where=where)


def check_base(stored: StoredAdapter, base: Mapping[str, str], *, where: str) -> None:
    """Raise unless ``base`` holds the weights that the adapter was trained on.

    Raises:
        CheckpointError: names the first weights that differ.
    """
    changed = [name for name, fingerprint in stored.base.items() if base.get(name) != fingerprint]
    if changed:
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        raise CheckpointError(
            f"The adapter of {where} was trained on the weights of {stored.layout.base_folder} as they were then; "
            f"{len(changed)} of {len(stored.base)} differ now or are missing: {', '.join(changed[:_SHOWN])}{more}. "
            "Use the base model that it was trained on."
        )
