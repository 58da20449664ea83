"""Small problems with few positives and of lists, and trainings on them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from fcco_experiments.data.grouped import GroupedPart
from fcco_experiments.data.synthetic import lists_synthetic, rare_synthetic
from fcco_experiments.task import Method
from fcco_experiments.tasks.network import Classifier
from fcco_experiments.tasks.x_risk.training import XRisk, XRiskTraining

BINARY = ("ap", "auc", "pauc", "tpauc", "bce", "focal")
LISTS = ("ndcg", "listwise", "pointwise")
CONFIG = XRisk(data="none", epochs=4, batch=40, warm=0.25, evaluate_batch=100)


def training(word: str, seed: int = 0, **changes: Any) -> XRiskTraining:
    """A training from its first step."""
    lists = word in LISTS
    changes = {"risk": "ndcg", "k": 5} | changes if lists else changes
    config = dataclasses.replace(CONFIG, **changes)
    made: Any = lists_synthetic(queries=30, rows=8) if lists else rare_synthetic(rows=400)
    values = torch.arange(5.0) if lists else torch.arange(2.0)
    parts: dict[str, GroupedPart] = made.cut(0)
    torch.manual_seed(seed)
    model = Classifier(None, 16, (), 1)
    method = Method(word, 0.02)
    device = torch.device("cpu")
    return XRiskTraining(config, method, seed, model, made.samples, parts, values, device)
