"""The half that makes the numbers: data -> rollout -> reward -> advantage -> update."""
