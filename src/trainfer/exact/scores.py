"""Log-prob and entropy of every scored row of a packed batch: what the trainer, the old and the ref pass ask for.

Takes a causal LM, a ``PackedBatch`` and temperatures; gives ``[S]`` float32 with autograd. On a CPU it is the model's
logits and ``exact.logprobs``. On a CUDA device in half precision a kernel reads each row of logits once, and the logits
of all rows never exist at one time: while ``forward_scores`` runs the model's own forward, its output head
answers with two numbers a row instead of V logits, chunk by chunk; the backward computes each chunk's logits again and
turns them into their gradient in place. (The model's own forward, so that sharded parameters are gathered as usual.)

The head answers so only in models that return what it gave, and while nobody watches it with a hook; otherwise the
logits come as usual and the same kernel reads them, with the same bits. The engine scores with it, too.

Axes: S scored rows, V vocabulary, D width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainfer.exact import gpu
from trainfer.exact.linear import RoutedLinear, linear
from trainfer.exact.logprobs import RowScores, log_distribution, row_entropies
from trainfer.exact.packed import CausalModel, PackedBatch, forward_logits

CHUNK_LOGITS = 1 << 27
"""Logits that are held at a time: 256 MiB in half precision."""
_CHANGED_AFTER_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "logit_softcap")
"""Keys of configurations whose models do something to the head's answer."""


def forward_scores(
    model: CausalModel, batch: PackedBatch, temperatures_S: Tensor, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target under its temperature, and entropy of each scored row in nats, ``[S]`` float32.

    Args:
        model: A causal LM; its head may become a ``ScoringHead``.
        batch: Rows to score.
        temperatures_S: 0 counts as 1.
        entropy_gradient: Whether a gradient passes the entropies.
    """
    head = _scoring_head(model)
    if head is None:
        logits_SV = forward_logits(model, batch)
        return scores_of_logits(logits_SV, batch.targets_S, temperatures_S, entropy_gradient=entropy_gradient)
    surplus = batch.scored_rows.shape[0] - batch.num_scored
    wanted = _Wanted(
        targets_S=torch.cat([batch.targets_S, batch.targets_S.new_zeros(surplus)]),
        temperatures_S=torch.cat([temperatures_S.float(), temperatures_S.new_ones(surplus).float()]),
    )
    with _wanting(head, wanted):
        scores_S2 = forward_logits(model, batch)
    logprobs_S, entropies_S = scores_S2.unbind(dim=-1)
    return logprobs_S, entropies_S if entropy_gradient else entropies_S.detach()


def scores_of_logits(
    logits_SV: Tensor, targets_S: Tensor, temperatures_S: Tensor, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """As ``forward_scores``, from logits."""
    if gpu.computes(logits_SV):
        logprobs_S, entropies_S = _LogitScores.apply(logits_SV, targets_S, temperatures_S.float())
        return logprobs_S, entropies_S if entropy_gradient else entropies_S.detach()
    logprobs_SV = log_distribution(logits_SV, temperatures_S)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies_S = row_entropies(logprobs_SV)
    return logprobs_SV.gather(1, targets_S[:, None])[:, 0], entropies_S


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    targets_S: Tensor
    temperatures_S: Tensor


class ScoringHead(RoutedLinear):
    """An output head that answers with log-probs and entropies while somebody wants them."""

    wanted: _Wanted | None = None

    def forward(self, input: Tensor) -> Tensor:
        """``[1, S, D]`` -> ``[1, S, V]``, or ``[1, S, 2]`` float32 inside ``forward_scores``."""
        if self.wanted is None:
            return super().forward(input)
        targets_S, temperatures_S = self.wanted.targets_S, self.wanted.temperatures_S
        if gpu.computes(input):
            scores = _HeadScores.apply(input[0], self.weight, targets_S, temperatures_S)
        else:
            scores = scores_of_logits(
                super().forward(input)[0], targets_S, temperatures_S, entropy_gradient=True
            )
        return torch.stack(scores, dim=-1)[None]


def _scoring_head(model: CausalModel) -> ScoringHead | None:
    """The model's head, made fit to answer with scores; None where the model's logits must be had."""
    assert isinstance(model, nn.Module)
    head = dict(model.named_children()).get("lm_head")
    if not isinstance(head, RoutedLinear) or head.weight.device.type != "cuda" or not gpu.has_kernels():
        return None
    if head.bias is not None or head._forward_hooks or head._forward_pre_hooks:  # a watcher wants logits
        return None
    if type(head) is RoutedLinear:
        settings = vars(vars(model)["config"])
        if any(settings.get(key) not in (None, 1, 1.0) for key in _CHANGED_AFTER_HEAD):
            return None
        head.__class__ = ScoringHead
    return head if isinstance(head, ScoringHead) else None


@contextmanager
def _wanting(head: ScoringHead, wanted: _Wanted) -> Iterator[None]:
    head.wanted = wanted
    try:
        yield
    finally:
        head.wanted = None


class _LogitScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_SV: Tensor, targets_S: Tensor, temperatures_S: Tensor
    ) -> tuple[Tensor, Tensor]:
        scores = gpu.row_scores(logits_SV, targets_S, temperatures_S)
        ctx.save_for_backward(logits_SV, targets_S, temperatures_S, *scores)
        return scores.logprobs_S, scores.entropies_S

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_SV, targets_S, temperatures_S, *scores = ctx.saved_tensors
        gradients = (grad_outputs[0].contiguous(), grad_outputs[1].contiguous())
        gradient_SV = gpu.logits_to_gradient_(
            logits_SV.clone(), targets_S, temperatures_S, RowScores(*scores), gradients
        )
        return gradient_SV, None, None


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_SD: Tensor, weight_VD: Tensor, targets_S: Tensor, temperatures_S: Tensor
    ) -> tuple[Tensor, Tensor]:
        parts = [
            gpu.row_scores(linear(rows_SD[chunk], weight_VD), targets_S[chunk], temperatures_S[chunk])
            for chunk in _chunks(rows_SD.shape[0], weight_VD.shape[0])
        ]
        scores = [torch.cat(column) for column in zip(*parts, strict=True)]
        ctx.save_for_backward(rows_SD, weight_VD, targets_S, temperatures_S, *scores)
        return scores[0], scores[1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None]:
        rows_SD, weight_VD, targets_S, temperatures_S, *scores = ctx.saved_tensors
        gradients = [gradient.contiguous() for gradient in grad_outputs]
        for_rows = torch.empty_like(rows_SD)
        for_weight: Tensor | None = None
        for chunk in _chunks(rows_SD.shape[0], weight_VD.shape[0]):
            gradient_SV = gpu.logits_to_gradient_(
                linear(rows_SD[chunk], weight_VD),
                targets_S[chunk],
                temperatures_S[chunk],
                RowScores(*(column[chunk] for column in scores)),
                (gradients[0][chunk], gradients[1][chunk]),
            )
            torch.mm(gradient_SV, weight_VD, out=for_rows[chunk])
            if ctx.needs_input_grad[1]:
                part = torch.mm(gradient_SV.t(), rows_SD[chunk], out_dtype=torch.float32)
                for_weight = part if for_weight is None else for_weight.add_(part)
        return for_rows, None if for_weight is None else for_weight.to(weight_VD.dtype), None, None


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(256, CHUNK_LOGITS // vocabulary // 256 * 256)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
