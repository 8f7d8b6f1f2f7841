"""A checkpoint of an adapter as plain weights, merged into its base, or as an adapter that PEFT loads.

Takes the stored adapter, a way to read its tensors and the base model's folder; gives names and tensors for
``checkpoint_export``. A merged weight is ``W + s B A``, computed in float32 and rounded once to the format that the base
has in its files. Before anything is written every weight of the base is held against the fingerprint that the checkpoint
recorded. Loads no PEFT and no Transformers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainfer.errors import CheckpointError
from trainfer.exact.fingerprint import fingerprint
from trainfer.train.update.adapter import adapted_layer, merge, part
from trainfer.train.update.checkpoint_adapter import StoredAdapter, check_base
from trainfer.train.update.checkpoint_tensors import DTYPES_BY_NAME, StoredTensor

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."

_HEADER_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Of a safetensors header."""

Read = Callable[[Sequence[str]], dict[str, Tensor]]
"""Some tensors of a checkpoint, whole, by name."""


class BaseWeights:
    """The safetensors of a model folder, opened one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Raises:
            CheckpointError: the folder holds no such weights.
        """
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        if not files:
            raise CheckpointError(
                f"The base model {folder} of this adapter holds no safetensors here. Name its folder with --base FOLDER, or "
                "export the adapter alone with --adapter."
            )
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self.stored: dict[str, StoredTensor] = {}
        for path in files:
            try:
                with safe_open(path, framework="pt") as handle:
                    for name in handle.keys():  # noqa: SIM118  (no mapping)
                        entry = handle.get_slice(name)
                        self._file_of[name] = path
                        self.stored[name] = StoredTensor(
                            shape=tuple(entry.get_shape()), dtype=_HEADER_DTYPES[entry.get_dtype()]
                        )
            except (SafetensorError, OSError, KeyError) as error:
                raise CheckpointError(f"{path} of the base model is damaged: {error}.") from error

    def read(self, name: str) -> Tensor:
        """One tensor."""
        with safe_open(self._file_of[name], framework="pt") as handle:
            return handle.get_tensor(name)


def merged_reader(adapter: StoredAdapter, read_adapter: Read, base: BaseWeights) -> Read:
    """Reads tensors of the base, adapted layers merged.

    Raises:
        CheckpointError: the base is not the one that the adapter was trained on.
    """
    missing = [layer for layer in adapter.layout.scalings if f"{layer}.weight" not in base.stored]
    if missing:
        raise CheckpointError(
            f"{base.folder} holds no weight of {missing[0]}, which the adapter changes; it is not the adapter's base model."
        )
    held = {
        name: _fingerprint_as(text, base.read(name))
        for name, text in adapter.base.items()
        if name in base.stored
    }
    known = StoredAdapter.of(adapter.layout, {name: adapter.base[name] for name in held})
    check_base(known, held, where=str(base.folder))

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        return {name: _merged(name, adapter, read_adapter, base) for name in names}

    return read


def _fingerprint_as(recorded: str, tensor: Tensor) -> str:
    """Of a tensor in the format in which the recorded fingerprint was taken."""
    dtype = DTYPES_BY_NAME.get(f"torch.{recorded.partition(':')[0]}")
    return fingerprint(tensor if dtype is None else tensor.to(dtype))


def _merged(name: str, adapter: StoredAdapter, read_adapter: Read, base: BaseWeights) -> Tensor:
    weight = base.read(name)
    layer = adapted_layer(name, adapter.layout)
    if layer is None:
        return weight
    parts = read_adapter([part(layer, "A"), part(layer, "B")])
    return merge(weight, parts[part(layer, "A")], parts[part(layer, "B")], adapter.layout.scalings[layer]).to(
        weight.dtype
    )


def write_adapter_folder(
    adapter: StoredAdapter, read_adapter: Read, out: Path, dtype: torch.dtype | None
) -> int:
    """Write what PEFT's ``from_pretrained`` loads into the existing folder ``out``; returns bytes of weights.

    Raises:
        OSError: it cannot be written.
    """
    names = {
        f"{_PEFT_PREFIX}{layer}.lora_{which}.weight": part(layer, which)
        for layer in adapter.layout.scalings
        for which in "AB"
    }
    values = read_adapter(list(names.values()))
    tensors: Mapping[str, Tensor] = {
        name: values[own] if dtype is None else values[own].to(dtype) for name, own in names.items()
    }
    save_file(dict(tensors), out / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(dict(adapter.layout.config), indent=2, sort_keys=True) + "\n"
    (out / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
