"""Which tokens end a response, the text of one, and how long a sequence may be."""

import json
from pathlib import Path

from transformers import AutoConfig, PreTrainedTokenizerBase

from trainfer.errors import ModelError


class ResponseDecoder:
    """Token ids to text; what ``train.rollout`` asks of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of one response."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str), "one response has one text"
        return text


def end_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends a response; ``load_tokenizer`` refuses tokenizers without one."""
    token_id = tokenizer.eos_token_id
    assert isinstance(token_id, int)
    return token_id


def max_positions(folder: Path | str) -> int | None:
    """Positions that the model of a folder knows, as its config says; None where it does not say.

    Raises:
        ModelError: there is no readable config.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: holds no config.json; give a local Hugging Face folder of a causal LM")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path / 'config.json'}: Transformers refuses it: {error}") from error
    known = config.get_text_config().to_dict().get("max_position_embeddings")
    return known if isinstance(known, int) else None


def stop_token_ids(folder: Path | str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokenizer's end token and those of ``generation_config.json`` (chat models often name two), ascending.

    Raises:
        ModelError: that file is damaged.
    """
    ids = {end_token_id(tokenizer)}
    path = Path(folder) / "generation_config.json"
    if path.is_file():
        try:
            named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ModelError(
                f"{path}: is not a readable JSON object ({error}); copy it from the model"
            ) from error
        listed = named if isinstance(named, list) else [] if named is None else [named]
        if not all(isinstance(item, int) for item in listed):
            raise ModelError(f"{path}: eos_token_id is {named!r}, neither a token id nor a list of them")
        ids.update(listed)
    return tuple(sorted(ids))
