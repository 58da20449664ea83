"""How close the last point is to a KKT point, on all training data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fcco import diagnostics
from fcco.contrastive import log_means

from ...task import Row

if TYPE_CHECKING:
    from .training import ContinualTraining

__all__ = ["certificate", "contrast"]


def contrast(run: ContinualTraining, images: Tensor, texts: Tensor, label: Tensor) -> Tensor:
    r"""The contrastive loss of the target over many pairs.

    .. math::
        \frac1n\sum_i \tau\bigl[\log(g_{i1} + e) + \log(g_{i2} + e)\bigr], \qquad
        e = 1/\text{number of pairs of protected classes}

    Args:
        run: temperature and sizes.
        images: unit vectors of the pairs.
        texts: of their captions.
        label: class of each, on the device.
    """
    logs = log_means(
        images, texts, run.config.temperature, label=label,
        anchor=label == len(run.config.protected), chunk=512, process_group=None,
    )  # fmt: skip
    return run.built.contrast.evaluate(logs)


def certificate(run: ContinualTraining) -> Row:
    """KKT residuals with the method's multipliers and with the best ones.

    For models whose backbones are frozen: everything is evaluated in one graph.
    """
    encoder, config, streams = run.encoder, run.config, run.streams
    number, own_pairs = len(config.protected), len(streams.anchors)
    rows = torch.cat([streams.anchors, streams.negatives])  # the former with the extra pairs
    label = torch.cat([torch.full((own_pairs,), number), streams.label]).to(run.device)
    values = run.samples.values[rows.to(run.device)]  # type: ignore[union-attr]
    captions, prompts = encoder.texts.captions[rows], encoder.texts.prompts
    limits = torch.tensor(run.old["train"].loss[:number].tolist(), device=run.device)

    def loss() -> Tensor:
        return contrast(run, *encoder(values, captions), label)

    def inner(index: Tensor) -> Tensor:
        seen, read = encoder(values[own_pairs:], prompts)
        own = label[own_pairs:]
        each = cross_entropy(encoder.scores(seen, read), own, reduction="none")
        means = [each[own == k].mean() - limits[k] for k in index.tolist()]
        return torch.stack(means)

    parameters = [p for p in encoder.model.parameters() if p.requires_grad]
    multipliers = run.built.multipliers()
    best = diagnostics.kkt(loss, inner, number, parameters, per_layer=False)
    found = {
        "kkt_best_stationarity": best.stationarity,
        "kkt_best_complementarity": best.complementarity,
        "kkt_feasibility": best.feasibility,
        "best_multipliers": best.multipliers.tolist(),
    }
    if multipliers is not None:
        used = diagnostics.kkt(
            loss, inner, number, parameters, multipliers=multipliers, per_layer=False
        )
        found |= {
            "kkt_stationarity": used.stationarity,
            "kkt_complementarity": used.complementarity,
        }
    return found
