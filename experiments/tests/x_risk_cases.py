"""Small problems with few positives and of lists, and trainings on them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from fcco_experiments.data.grouped import GroupedData, GroupedPart, Vectors, WholeGroups
from fcco_experiments.data.synthetic import rare_synthetic
from fcco_experiments.task import Method
from fcco_experiments.tasks.network import Classifier
from fcco_experiments.tasks.x_risk.training import XRisk, XRiskTraining

BINARY = ("ap", "auc", "pauc", "tpauc", "bce", "focal")
LISTS = ("ndcg", "listwise", "pointwise")
CONFIG = XRisk(data="none", epochs=4, batch=40, warm=0.25, evaluate_batch=100)


def lists(queries: int = 30, rows: int = 8) -> GroupedData:
    """Rows of queries with relevance 0 to 4, which depends on features and on the query."""
    random = torch.Generator().manual_seed(0)
    query = torch.arange(queries).repeat_interleave(rows)
    table = torch.randn(len(query), 16, generator=random)
    score = table[:, 1:] @ torch.randn(15, generator=random) / 4 + table[:, 0]
    relevance = torch.bucketize(score, torch.arange(4.0))
    cut = WholeGroups(relevance, query, tuple(f"query {number}" for number in range(queries)))
    return GroupedData("lists", "vector", Vectors(table), ("0", "1", "2", "3", "4"), cut, "lists")


def training(word: str, seed: int = 0, **changes: Any) -> XRiskTraining:
    """A training from its first step."""
    ranked = word in LISTS
    changes = {"risk": "ndcg", "k": 5} | changes if ranked else changes
    config = dataclasses.replace(CONFIG, **changes)
    made: Any = lists() if ranked else rare_synthetic(rows=400)
    values = torch.arange(5.0) if ranked else torch.arange(2.0)
    parts: dict[str, GroupedPart] = made.cut(0)
    torch.manual_seed(seed)
    model = Classifier(None, 16, (), 1)
    method = Method(word, 0.02)
    device = torch.device("cpu")
    return XRiskTraining(config, method, seed, model, made.samples, parts, values, device)
