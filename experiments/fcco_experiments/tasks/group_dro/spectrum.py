"""The assumption LBSV on full data: eigenvalues of the Gram matrix of the groups' gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ... import strategy
from ...task import Row
from ..base import chunks

if TYPE_CHECKING:
    from .training import GroupDROTraining

__all__ = ["check", "jacobian", "spectrum"]

_MOST = 1 << 36
"""Bytes of the gradients of all groups, which are held at once."""


def check(training: GroupDROTraining) -> None:
    """Refuse, before any step, a training whose Jacobian cannot be computed at its end."""
    if training.sharded:
        raise ValueError(
            "`spectrum` needs whole weights on every process, but `strategy: fsdp2` shards them; "
            "use ddp, or leave the spectrum out."
        )
    number = len(training.train.group_names)
    size = 8 * number * sum(w.numel() for w in training.model.parameters() if w.requires_grad)
    if size > _MOST:
        raise ValueError(
            f"`spectrum` holds the gradients of all {number} groups at once, here "
            f"{size / 2**30:.0f} GiB, more than {_MOST >> 30}; leave it out."
        )


def spectrum(training: GroupDROTraining) -> Row:
    r"""The smallest eigenvalue of :math:`J J^\top`, rows :math:`\nabla L_i(w)`, over all weights.

    With the threshold s as a further variable each row gets the entry -1 (the derivative of
    L_i - s), which adds 1 to every entry of the matrix.
    """
    rows = jacobian(training)
    gram = torch.stack([rows @ row for row in rows]).double()
    plain, bordered = (torch.linalg.eigvalsh(each) for each in (gram, gram + 1.0))
    return {
        "gram_smallest": max(plain[0].item(), 0.0),
        "gram_smallest_with_s": max(bordered[0].item(), 0.0),
        "gram_largest": plain[-1].item(),
    }


def jacobian(training: GroupDROTraining) -> Tensor:
    """The gradient of each group's training loss, (n, d), batch by batch, in float64.

    Unlike `fcco.diagnostics.smallest_eigenvalue` it needs the graph of one batch at a time, so a
    group may have thousands of images; the price is memory for n gradients. Batches have the size
    of those in training, since larger ones of evaluation need room for no graph.
    """
    config = training.config
    config = replace(config, evaluate_batch=min(config.batch, config.evaluate_batch))
    part, model = training.train, strategy.unwrapped(training.model)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    number, sizes = len(part.group_names), torch.bincount(part.group)
    result = torch.zeros(
        number, sum(w.numel() for w in weights), dtype=torch.float64, device=training.device
    )
    for group in range(number):
        own = torch.nonzero(part.group == group).squeeze(1)
        label = part.label[own].to(training.device)
        pieces = chunks(config, training.samples, part.rows[own], training.device)
        for places, inputs in pieces:
            with torch.enable_grad():
                scores = model(inputs)
                loss = cross_entropy(scores, label[places.to(label.device)], reduction="sum")
                found = torch.autograd.grad(loss, weights)
            flat = torch.cat([each.reshape(-1) for each in found])
            result[group] += flat.double() / sizes[group]
    return result
