"""Faults to plant in a run, from outside: ``VERL_CPU_FAULT`` names one. Those that configuration can plant need nothing here."""

import os

FAULT = "VERL_CPU_FAULT"
SKIPPED = "model.layers.1.mlp.down_proj.weight"


def plant_in_engine():
    """In vLLM's processes."""
    if os.environ.get(FAULT) != "skipped_parameter":
        return
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    load_weights = Qwen3ForCausalLM.load_weights
    if getattr(load_weights, "_plants_a_fault", False):
        return

    def without_one(self, weights):
        """The first load brings all weights, later ones leave one behind."""
        is_first = not getattr(self, "_has_loaded", False)
        self._has_loaded = True
        kept = weights if is_first else ((name, value) for name, value in weights if name != SKIPPED)
        return load_weights(self, kept)

    without_one._plants_a_fault = True
    Qwen3ForCausalLM.load_weights = without_one


def plant_in_trainer():
    """In verl's processes; verl is half imported now."""
    if os.environ.get(FAULT) != "swapped_prompts":
        return
    from trainfer.integrations.verl.after_import import watch

    watch(frozenset({"verl.workers.engine.fsdp.transformer_impl"}), _swap_prompts)


def _swap_prompts(module):
    import torch

    forward = module.FSDPEngineWithLMHead.forward_step

    def swapped(self, micro_batch, loss_function, forward_only):
        """The first sequence and one of another prompt of that length get each other's prompt."""
        batch = micro_batch.copy()
        ids = list(batch["input_ids"].unbind())
        prompts = list(batch["prompts"].unbind())
        cut = len(prompts[0])
        for other in range(1, len(ids)):
            if len(prompts[other]) == cut and not torch.equal(prompts[other], prompts[0]):
                first, second = ids[0], ids[other]
                ids[0] = torch.cat([second[:cut], first[cut:]])
                ids[other] = torch.cat([first[:cut], second[cut:]])
                offsets = batch["input_ids"].offsets()  # the same object: other tensors of the batch share it
                batch["input_ids"] = torch.nested.nested_tensor_from_jagged(torch.cat(ids), offsets)
                break
        return forward(self, batch, loss_function, forward_only)

    module.FSDPEngineWithLMHead.forward_step = swapped
