"""Attaches to a stock verl run, without editing it.

``trainfer attach -- COMMAND`` puts ``TRAINFER_ATTACH`` into the environment and runs COMMAND. Every process of the run that
imports verl loads ``plugin`` (entry point ``verl.plugins``, or ``VERL_USE_EXTERNAL_MODULES``), which hooks what the table of the
installed version names (``points``, ``v091``, ``v061``) as soon as its module has been imported (``after_import``, ``wrapping``).
Without the variable nothing happens.
"""
