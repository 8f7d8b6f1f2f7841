"""The model of a dump that holds its weights whole (``weights="full"``), built again.

Takes an open side; gives the causal LM that its manifest describes, with the dump's own parameters and with buffers as
the configuration prescribes them. The dump is not trusted: only architectures that Transformers contains are built, first
without memory to see that every shape is that of the dump's tensors, and nothing of it is executed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trainfer.check.align.names import name_map
from trainfer.check.align.weights import Weight, weights_by_version
from trainfer.check.compare.source import ReadableSide
from trainfer.check.dump.records import Role
from trainfer.check.dump.tensors import DTYPES

_NOT_CONFIG = frozenset({"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"})
_MAX_COUNT = 4096
"""Layers or experts: a configuration that asks for more is refused before a module is made."""


def rebuild(side: ReadableSide) -> nn.Module | None:
    """The model that a side ran, on the CPU; None where the dump does not hold all of it.

    Raises:
        DamagedRecordError: the bytes of a parameter are not whole.
    """
    whole = _whole_weights(side)
    if not whole:
        return None
    config = _config(side.manifest.model_config)
    if config is None:
        return None
    with torch.device("meta"):
        wanted = dict(_build(config, torch.float32).named_parameters())
    if set(wanted) != {*whole} & {*wanted} or any(
        tuple(parameter.shape) != whole[name].shape for name, parameter in wanted.items()
    ):
        return None
    dtypes = {DTYPES[whole[name].dtype] for name in wanted}
    model = _build(config, dtypes.pop() if len(dtypes) == 1 else torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.data = _value(side, whole[name])
    return model.eval()


def _whole_weights(side: ReadableSide) -> dict[str, Weight]:
    """Parameters of the newest version whose values are all there; empty where none is."""
    for version in sorted(weights_by_version(side, name_map()).items(), reverse=True):
        parameters = {name: w for name, w in version[1].items() if w.role is Role.PARAMETER}
        stored = {name: w for name, w in parameters.items() if _is_stored(w)}
        if stored and all(name in stored or w.tied_to in stored for name, w in parameters.items()):
            return stored
    return {}


def _is_stored(weight: Weight) -> bool:
    return len(weight.records) == 1 and weight.records[0][1].blob is not None and weight.dtype in DTYPES


def _config(described: Mapping[str, object]) -> PretrainedConfig | None:
    kind = described.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    rest = {key: value for key, value in described.items() if key not in _NOT_CONFIG and key != "model_type"}
    counts = [value for key, value in rest.items() if "layer" in key or "expert" in key]
    if any(isinstance(value, int) and value > _MAX_COUNT for value in counts):
        return None
    try:
        return AutoConfig.for_model(kind, **rest)
    except Exception:  # noqa: BLE001 (a description that is not to be trusted may fail in any way)
        return None


def _build(config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")


def _value(side: ReadableSide, weight: Weight) -> Tensor:
    rank, record = weight.records[0]
    return side.load(rank, record).clone()
