"""Chosen experts are compared as choices."""

import torch
from dump_by_hand import SideContent, Written

import trainfer


def test_another_expert_is_routing_at_its_router_and_rows(write_side):
    logits, chosen = torch.tensor([[1.0, 2.0], [3.0, 1.0], [2.0, 2.0]]), torch.tensor([[1], [0], [0]])
    flipped = torch.tensor([[1], [0], [1]])
    module = "model.layers.1.mlp.gate"

    def side(choice: torch.Tensor) -> SideContent:
        return SideContent(
            sequences=[[1, 2, 3]],
            tensors=[Written(module, logits, name="0"), Written(module, choice, name="2")],
        )

    result = trainfer.compare(write_side("rollout", side(chosen)), write_side("train", side(flipped)))
    assert (result.first_divergence.module, result.first_divergence.tokens) == (module, ((0, 2),))
    assert result.causes[0].cause == "moe.routing"
    assert "1 of 3 rows" in result.causes[0].evidence[0]
