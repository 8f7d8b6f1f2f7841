"""Imports what trainfer could hook and prints what was hooked: unattached.py MODULE:QUALIFIED_NAME...

Plugins are loaded as verl and vLLM load them. Nothing of trainfer is imported here.
"""

import importlib
import json
import sys

MARKS = ("_trainfer_advice", "_trainfer_installed")


def main():
    if any(word.startswith("verl.") for word in sys.argv[1:]):
        importlib.import_module("verl")
    importlib.import_module("vllm.plugins").load_general_plugins()
    marked = []
    for word in sys.argv[1:]:
        module, _, name = word.partition(":")
        target = importlib.import_module(module)
        for part in name.split("."):
            target = vars(target)[part]
        if any(hasattr(target, mark) for mark in MARKS):
            marked.append(word)
    finders = [finder if isinstance(finder, type) else type(finder) for finder in sys.meta_path]
    found = {
        "marked": marked,
        "finders": [f.__name__ for f in finders if f.__module__.partition(".")[0] == "trainfer"],
        "modules": sorted(name for name in sys.modules if name.partition(".")[0] == "trainfer"),
    }
    print("FOUND", json.dumps(found))


main()
