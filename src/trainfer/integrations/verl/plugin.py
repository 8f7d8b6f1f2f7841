"""What verl loads in each of its processes: the entry point ``verl.plugins``, or ``VERL_USE_EXTERNAL_MODULES``.

Importing it does nothing unless ``trainfer attach`` has set ``TRAINFER_ATTACH``. verl is half imported at this time: nothing of
it may be imported here.
"""

import os

if os.environ.get("TRAINFER_ATTACH"):
    from trainfer.integrations.verl.install import install

    install()
