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

SideLike = str | Path | ReadableSide


def compare(rollout: SideLike, train: SideLike, model: nn.Module | str | Path | None = None) -> Diagnosis:
    """Compare what the rollout computed with what training computed.

    Args:
        rollout: A dump's folder, or an open side.
        train: Likewise.
        model: A model's folder: its tokenizer gives texts to tokens. A module is accepted for a replay.

    Raises:
        DumpError: a folder holds no dump.
        ModelError: the model's folder is not there.
    """
    tokenizer = None if model is None or isinstance(model, nn.Module) else _tokenizer(Path(model))
    first, second = open_side(rollout), open_side(train)
    if tokenizer is None:
        return diagnose(first, second)
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

    return diagnose(first, second, decode=decode, texts=texts)


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
    return MsprobeSide(path) if is_msprobe_dump(path) else DumpSide(path)


def _tokenizer(folder: Path) -> Tokenizer | None:
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is no folder; --model takes a model's folder (config.json, tokenizer.json)"
        )
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.is_file() else None
