"""What trainfer adds to vLLM's worker: called by name through ``collective_rpc``, in every worker of an engine.

vLLM makes this class a base of its worker, so it has no constructor of its own and may not reuse a name.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

from trainfer.engines.vllm.effective import pieces
from trainfer.engines.vllm.layout import is_head, sources
from trainfer.engines.vllm.pieces import Piece
from trainfer.engines.vllm.rotary import rotary_mismatch


class WeightsExtension:
    """Loads weights and says what is computed with."""

    model_runner: Any
    """vLLM's, set by the worker."""

    def trainfer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's Transformers name and whole shape, in the order of the modules."""
        return {source.name: source.shape for source in sources(self._trainfer_model())}

    def trainfer_ties(self) -> dict[str, str]:
        """Names that share a parameter with an earlier name -> the earlier name."""
        owners: dict[int, str] = {}
        ties: dict[str, str] = {}
        for source in sources(self._trainfer_model()):
            shared = id(source.module.get_parameter(source.attribute))
            owner = owners.setdefault(shared, source.name)
            if owner != source.name and is_head(source.module):
                ties[source.name] = owner
        return ties

    @torch.no_grad()
    def trainfer_load(self, bucket: list[tuple[str, Tensor]]) -> None:
        """Replace the weights of some whole modules; the others stay as they are."""
        self.model_runner.reload_weights(weights_iterator=iter(bucket))
        model = self._trainfer_model()
        if current_platform.is_cpu():
            _repack_tied_head(model)

    def trainfer_pieces(self) -> list[Piece]:
        """This worker's part of everything that is computed with."""
        return list(pieces(self._trainfer_model()))

    def trainfer_rotary_mismatch(self, inv_freq: Tensor) -> str | None:
        """See ``rotary.rotary_mismatch``."""
        return rotary_mismatch(self._trainfer_model(), inv_freq)

    def _trainfer_model(self) -> nn.Module:
        return self.model_runner.get_model()


def _repack_tied_head(model: nn.Module) -> None:
    """Pack a tied head again from the embedding that it shares.

    reload_weights packs the modules whose weights arrive. A tied head's weight arrives under the embedding's
    name, so on a CPU its packed copy, the one that gives the logits, would stay the old one.
    """
    owners: dict[int, nn.Module] = {}
    module: Any
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owner = owners.setdefault(id(parameter), module)
            if owner is not module and is_head(module):
                module.quant_method.process_weights_after_loading(module)
