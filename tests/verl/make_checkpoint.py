"""A tiny random Qwen3 and a byte-level tokenizer, nothing downloaded: make_checkpoint.py OUT VOCABULARY.

Vocabulary 0 is the tokenizer's own size; a larger one than that is padded. (vLLM on a CPU wants heads of 32 or more.)
"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TOKENS = 400
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main():
    out, vocabulary = sys.argv[1], int(sys.argv[2])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (
            f"What is {a} + {b}? The answer is {a + b}. Let us think step by step."
            for a in range(50)
            for b in range(50)
        ),
        trainer,
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048
    )
    fast.chat_template = CHAT
    config = Qwen3Config(
        vocab_size=vocabulary or len(fast), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=False,
        eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(8.0)  # log-probs that are not all near -log V
    model.save_pretrained(out)
    fast.save_pretrained(out)


main()
