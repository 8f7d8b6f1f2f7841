"""Write verl's own defaults, flattened, as the planner reads them.

Run by an interpreter that has the wheel installed (verl 0.6.1 or 0.9.1; nothing of trainfer):

    PYTHON_OF_VERL tests/golden/make_verl_defaults.py OUTPUT_FOLDER

writes ``verl_defaults_VERSION.json``: ``fsdp`` has every key of the default configuration, composed
by Hydra and not resolved; ``megatron`` what differs when the Megatron engine is chosen.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf


def flatten(node, prefix=""):
    if isinstance(node, dict) and node:
        for name, child in node.items():
            yield from flatten(child, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, node


def composed(config_name, overrides):
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        config = compose(config_name=config_name, overrides=overrides)
    return dict(flatten(OmegaConf.to_container(config, resolve=False)))


def main():
    release = version("verl")
    fsdp = composed("ppo_trainer", [])
    if release.startswith("0.6"):
        megatron = composed("ppo_megatron_trainer", [])
    else:
        megatron = composed("ppo_trainer", ["model_engine=megatron"])
    missing = object()
    changed = {key: value for key, value in megatron.items() if fsdp.get(key, missing) != value}
    absent = sorted(key for key in fsdp if key not in megatron)
    document = {"verl": release, "fsdp": fsdp, "megatron": {"changed": changed, "absent": absent}}
    path = Path(sys.argv[1]) / f"verl_defaults_{release}.json"
    path.write_text(json.dumps(document, indent=0, sort_keys=True) + "\n")
    print(path, len(fsdp), len(changed), len(absent))


if __name__ == "__main__":
    main()
