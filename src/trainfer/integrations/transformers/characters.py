"""A tokenizer whose tokens are the characters of some texts: the demonstration's small vocabulary.

Takes texts; gives a tokenizer with one token per character that occurs in them (per UTF-8 byte for characters
beyond ASCII), the special tokens of ``tiny.byte_tokenizer`` and one for everything else.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainfer.integrations.transformers.tiny import CHAT_TEMPLATE, END_TOKEN, PAD_TOKEN, SPECIAL_TOKENS

UNKNOWN_TOKEN = "<|unknown|>"


def character_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Ids are the special tokens in their order, the unknown token, then the characters in order of their bytes."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = sorted(
        {letter for text in texts for piece, _ in split.pre_tokenize_str(text) for letter in piece}
    )
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, UNKNOWN_TOKEN, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN_TOKEN))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        model_max_length=1 << 20,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
