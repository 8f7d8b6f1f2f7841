"""vLLM's entry point ``vllm.general_plugins``: called in every engine and worker process, asked for or not.

Looks at one variable of the environment, and imports nothing where it is not set.
"""

import os


def register() -> None:
    """See ``install.install``."""
    if os.environ.get("TRAINFER_CAPTURE"):
        from trainfer.integrations.vllm.install import install

        install()
