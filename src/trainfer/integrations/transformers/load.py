"""Models and tokenizers of Transformers, from local folders only.

Takes a folder with ``config.json`` and safetensors; gives a causal LM whose attention is trainfer's, or its
tokenizer. Nothing is downloaded, no code of the folder is run, no pickle is opened; every defect of the
folder is a ``ModelError`` with its remedy, the cheap checks first. Sharding and training are elsewhere.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import safetensors
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from trainfer.errors import ModelError
from trainfer.exact.attention import ATTENTION_NAME
from trainfer.exact.linear import route_linears
from trainfer.exact.routed import route_modules
from trainfer.integrations.transformers.register import register_attention
from trainfer.integrations.transformers.tiny import byte_tokenizer, tiny_model

__all__ = ["byte_tokenizer", "load_model", "load_tokenizer", "save_model", "tiny_model"]

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def load_model(
    folder: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    attention: str = ATTENTION_NAME,
) -> PreTrainedModel:
    """The causal LM of a local folder, in eval mode.

    Args:
        folder: A Transformers folder with safetensors.
        dtype: Parameters are converted to it.
        device: Where the parameters go.
        attention: ``"trainfer"`` (our attention and linears), or a stock implementation such as ``"sdpa"`` for a
            reference that computes as Transformers does.

    Raises:
        ModelError: The folder is missing or damaged, or its architecture is not a causal LM that
            Transformers knows.
    """
    path = _model_folder(folder)
    _check_architecture(path)
    _check_weight_files(path)
    register_attention()
    try:
        with _no_progress_bar():
            loaded = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        raise ModelError(f"{path}: Transformers cannot build this model: {_first_line(error)}") from error
    assert isinstance(loaded, tuple), "output_loading_info was asked for"
    model, info = loaded
    assert isinstance(model, PreTrainedModel)
    _check_weight_names(path, info)
    nn.Module.to(model, device)
    if attention == ATTENTION_NAME:
        route_linears(model)
        route_modules(model)
    return model.eval()


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder.

    Raises:
        ModelError: The folder holds no tokenizer that loads, or one without an end-of-sequence token.
    """
    path = _model_folder(folder)
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        # Transformers would make up an empty tokenizer of the model's usual class.
        raise ModelError(
            f"{path}: holds no tokenizer; copy tokenizer.json and tokenizer_config.json of the model into it"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"{path}: no tokenizer could be loaded ({_first_line(error)}); copy tokenizer.json and "
            "tokenizer_config.json of the model into the folder"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"{path}: the tokenizer has no eos_token, so no response could end; set it in tokenizer_config.json"
        )
    return tokenizer


def save_model(
    model: nn.Module, folder: Path | str, *, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write config, safetensors and, if given, the tokenizer; ``AutoModelForCausalLM`` loads the folder."""
    assert isinstance(model, PreTrainedModel), "only models of Transformers can be saved as such"
    with _no_progress_bar():
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"


def _model_folder(folder: Path | str) -> Path:
    path = Path(folder)
    if not path.exists():
        raise ModelError(f"{path}: no such model folder; give a local folder (nothing is downloaded)")
    if not path.is_dir():
        raise ModelError(f"{path}: is a file; give the folder that holds config.json and *.safetensors")
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path}: holds no config.json; give a folder written by save_pretrained or `trainfer export`"
        )
    return path


def _check_architecture(path: Path) -> None:
    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path / 'config.json'}: is not readable JSON ({_first_line(error)})") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise ModelError(f"{path / 'config.json'}: names no model_type; is it a Transformers config?")
    kind = raw["model_type"]
    if "auto_map" in raw and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{path}: model_type {kind!r} needs the folder's own Python code, which is never run; "
            "use an architecture that Transformers contains"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{path}: model_type {kind!r} is no causal language model known to this Transformers version"
        )
    try:
        AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"{path / 'config.json'}: Transformers refuses it: {_first_line(error)}") from error


def _check_weight_files(path: Path) -> None:
    """Open every shard's header; tensors themselves are read later, once."""
    files = _weight_files(path)
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: is named in the weight index but missing; copy it into the folder")
        try:
            with safetensors.safe_open(file, framework="pt") as handle:
                handle.keys()
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(
                f"{file}: is damaged ({_first_line(error)}); copy or export the model again"
            ) from error


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index}: is no weight index ({_first_line(error)})") from error
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ModelError(f"{index}: names files outside its folder; only plain file names are read")
        return [path / name for name in names]
    single = path / "model.safetensors"
    if single.is_file():
        return [single]
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise ModelError(
            f"{path}: holds only pickled weights ({pickles[0]}), which can run code when opened; convert them on a machine "
            "that you trust with model.save_pretrained(folder), which writes safetensors"
        )
    raise ModelError(f"{path}: holds no model.safetensors; copy the weights into the folder")


def _check_weight_names(path: Path, info: dict[str, object]) -> None:
    for key, verb in (
        ("missing_keys", "lack"),
        ("mismatched_keys", "have another shape for"),
        ("unexpected_keys", "hold, with no place in the model,"),
    ):
        names = sorted(str(name) for name in _names(info.get(key)))
        if names:
            listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ModelError(
                f"{path}: the weights {verb} {listed}; the files and config.json belong to different models"
            )


def _names(value: object) -> list[object]:
    return list(value) if isinstance(value, (set, list, tuple)) else []
