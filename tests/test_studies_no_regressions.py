"""The studies on domains of text, with toy models and texts in place of theirs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from studies import mixtures  # noqa: E402
from studies import no_regressions as study  # noqa: E402
from studies.runner import Job  # noqa: E402

SIZE = study.Size(steps=60, rows=6, length=12)


def archive() -> Any:
    """Two domains of words that occur in one alone, and a target that uses some of both."""
    draw = np.random.default_rng(0)

    def words(first: int, number: int) -> str:
        return " ".join(f"w{k}" for k in draw.integers(first, first + 10, number))

    for split in ("train", "test"):
        for name, first in (("code", 0), ("law", 10)):
            yield f"lm_domains/{split}/{name}.txt", "\n\f\n".join(words(first, 40) for _ in "abcd")
        lines = [{"question": words(5, 9), "answer": words(5, 9)} for _ in range(12)]
        yield f"target/gsm8k_{split}.jsonl", "\n".join(map(json.dumps, lines))


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = {"<eos>": 0, "<unk>": 1} | {f"w{k}": 2 + k for k in range(20)}
    split = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # type: ignore[arg-type]
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[attr-defined]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=split, eos_token="<eos>")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=22, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    monkeypatch.setattr(study, "pretrained", lambda: (tokenizer, model))
    monkeypatch.setattr(study, "_archive", archive)
    monkeypatch.setattr(study, "FULL", SIZE)
    monkeypatch.setattr(study, "RATE", 0.02)
    for function in (study.texts, study.before, mixtures.texts):
        function.cache_clear()


def test_the_loss_of_a_row_is_the_mean_over_its_tokens() -> None:
    draw = torch.Generator().manual_seed(0)
    ids, tokens = torch.randint(0, 7, (3, 5), generator=draw), torch.tensor([5, 3, 2])
    logits = torch.randn(3, 5, 7, generator=draw)
    found = study.losses_of(logits, study.Rows(ids, tokens, tokens))
    for row, number in enumerate(tokens.tolist()):
        own = [
            float(logits[row, k].exp().sum().log() - logits[row, k, ids[row, k + 1]])
            for k in range(number - 1)
        ]
        assert found[row].item() == pytest.approx(np.mean(own), rel=1e-5)


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("method", study.GRID)
def test_a_run_learns_the_target_and_measures_the_domains(method: str) -> None:
    if method == "Cooper":
        pytest.importorskip("cooper")
    names, data = study.texts(SIZE)
    assert names == ["code", "law"] and set(data["train"].domain.tolist()) == {-1, 0, 1}
    job = Job("toy / cpu / full", method, dict(study.GRID[method][0]), 0)
    found, again = study.run(job), study.run(job)
    assert found["target"] < found["target_before"] and set(found["rise"]) == set(names)
    assert found["rise"] == again["rise"] and 0 <= found["certified"] <= 2
    if method == "plain":
        assert max(found["rise"].values()) > study.TOLERANCE, "nothing is at stake"
    if method == "replay":
        sources = study.Sources(data["train"], names, 0)
        shares = [(data["train"].domain[sources.share(6, 0.1)] >= 0).sum() for _ in range(400)]
        assert torch.stack(shares).float().mean().item() == pytest.approx(0.6, abs=0.1)


def test_a_gpt_sees_the_past_alone() -> None:
    torch.manual_seed(0)
    model, ids = mixtures.GPT(mixtures.SMALL), torch.randint(0, 256, (1, 9))
    changed = ids.clone()
    changed[0, 6] += 1 - 2 * (changed[0, 6] > 0).long()
    one, two = model(ids), model(changed)
    torch.testing.assert_close(one[:, :6], two[:, :6])
    assert not torch.allclose(one[:, 6:], two[:, 6:])


@pytest.mark.usefixtures("toys")
def test_mixtures_train_on_every_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    size = mixtures.Size(1, 32, steps=5, rows=2, length=16, rate=0.01, test=4)
    monkeypatch.setattr(mixtures, "SMALL", size)
    monkeypatch.setattr(mixtures, "RATIO", 0.5)
    for method in mixtures.METHODS:
        found = mixtures.run(Job("toy / cpu / small", method, {}, 0))
        assert len(found["bits"]) == 2 and max(found["bits"]) < 8.5
        if found["weights"] is not None:
            assert sum(found["weights"]) == pytest.approx(1, abs=1e-3)
