"""``trainfer.compare``: two dumps by their folders, whichever tool wrote them.

Takes folders (trainfer's dumps or msProbe's) or sides that are already open; gives a ``Diagnosis``. Token texts come
from a ``tokenizer.json`` beside the model, where one is named.
"""

from pathlib import Path

from tokenizers import Tokenizer
from torch import nn

from trainfer.check.compare.source import DumpSide, ReadableSide
from trainfer.check.diagnose import Diagnosis, diagnose
from trainfer.errors import DumpError, ModelError
from trainfer.integrations.msprobe.reader import MsprobeSide, is_msprobe_dump
from trainfer.integrations.parts import PartsSide, part_folders

SideLike = str | Path | ReadableSide


def compare(
    rollout: SideLike, train: SideLike, model: nn.Module | str | Path | None = None, *, replay: bool = True
) -> Diagnosis:
    """Compare what the rollout computed with what training computed.

    Args:
        rollout: A dump's folder, or an open side.
        train: Likewise.
        model: The model that both sides are to have, or its folder (safetensors; nothing is downloaded, no code of the
            folder is run): every module is replayed in float64, and the folder's tokenizer gives texts to tokens. None
            takes the model of a dump that holds its weights whole (``weights="full"``), where one does.
        replay: False uses a folder's tokenizer alone.

    Raises:
        DumpError: a folder holds no dump.
        ModelError: the model's folder is not there, or holds no model that can be loaded.
    """
    tokenizer = None if model is None or isinstance(model, nn.Module) else _tokenizer(Path(model))
    first, second = open_side(rollout), open_side(train)
    _settle_weights(first, second)
    module = _reference(model, (first, second)) if replay else None
    assert module is None or isinstance(module, nn.Module)
    if tokenizer is None:
        return diagnose(first, second, model=module)
    used = {
        token
        for side in (first, second)
        for rank in side.ranks
        for record in side.sequences(rank)
        for token in record.tokens
    }
    known = [token for token in used if 0 <= token < tokenizer.get_vocab_size()]
    texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in known}

    def decode(ids: object) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)  # type: ignore[call-overload]

    return diagnose(first, second, decode=decode, texts=texts, model=module)


def _settle_weights(*sides: ReadableSide) -> None:
    """MsProbe's statistics stand for weights only where both sides have nothing better."""
    without_values = [side for side in sides if isinstance(side, MsprobeSide) and not side.has_values]
    if len(without_values) < len(sides):
        for side in without_values:
            side.hide_weights()


def open_side(side: SideLike) -> ReadableSide:
    """A dump's folder as a side.

    Raises:
        DumpError: it holds no dump of a known tool.
    """
    if not isinstance(side, str | Path):
        return side
    path = Path(side)
    if not path.is_dir():
        raise DumpError(f"{path} is no folder; name the folder that trainfer.capture wrote")
    if part_folders(path):
        return PartsSide(path)
    return MsprobeSide(path) if is_msprobe_dump(path) else DumpSide(path)


def _tokenizer(folder: Path) -> Tokenizer | None:
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is no folder; --model takes a model's folder (config.json, tokenizer.json)"
        )
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.is_file() else None


def _reference(
    model: nn.Module | str | Path | None, sides: tuple[ReadableSide, ReadableSide]
) -> nn.Module | None:
    """The model to replay with: as handed over, of a folder in the dtype that it was saved in, or of a dump that holds
    all weights; None where there is none, or a folder holds a tokenizer alone.
    """
    if isinstance(model, nn.Module):
        return model
    if model is None and not any(_has_values(side) for side in sides):
        return None
    if model is not None and not (Path(model) / "config.json").is_file():
        return None
    from trainfer.integrations.transformers.rebuild import rebuild
    from trainfer.integrations.transformers.reference import load_reference

    if model is not None:
        return load_reference(Path(model))
    found = (rebuild(side) for side in reversed(sides))
    return next((module for module in found if module is not None), None)


def _has_values(side: ReadableSide) -> bool:
    """Some weight was captured whole; msProbe's dumps hold none."""
    return any(record.blob is not None for rank in side.ranks for record in side.weights(rank))
