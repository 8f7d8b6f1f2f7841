"""GRPO post-training in which the policy that samples is the policy that trains.

Reading order for a newcomer:
``config -> plan -> train.data -> train.rollout -> train.reward -> train.advantage -> train.update``
strung together by ``run``; and ``check.probe -> dump -> align -> compare -> explain -> report``.

This file imports nothing, so that ``trainfer --help`` and ``trainfer plan`` never load torch.
"""
