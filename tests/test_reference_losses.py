"""Reference losses: measured once, in evaluation mode, every row once; kept in checked files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fcco import ReferenceLosses
from fcco._files import state_checksum

SIZE = 23
X = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(0))
LABEL = torch.arange(SIZE) % 3
DATA = "samples of the test, cross entropy"


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))


def losses(model: nn.Module, rows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(X[rows]), LABEL[rows], reduction="none")


def by_hand(model: nn.Sequential) -> np.ndarray:
    """Each sample on its own, in NumPy: running statistics, no dropout."""
    state = {name: value.double().numpy() for name, value in model.state_dict().items()}
    result = []
    for x, label in zip(X.double().numpy(), LABEL, strict=True):
        hidden = state["0.weight"] @ x + state["0.bias"]
        hidden = (hidden - state["1.running_mean"]) / np.sqrt(state["1.running_var"] + 1e-5)
        score = state["3.weight"] @ (hidden * state["1.weight"] + state["1.bias"]) + state["3.bias"]
        result.append(np.log(np.exp(score).sum()) - score[label])
    return np.array(result)


class Counting:
    """A generator function that knows how often it ran."""

    def __init__(self, model: nn.Module, order: Tensor | None = None) -> None:
        self.model, self.runs = model, 0
        self.order = torch.randperm(SIZE) if order is None else order

    def __call__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.runs += 1
        for rows in self.order.split(5):
            yield rows, losses(self.model, rows)


# The numbers.


def test_they_are_the_losses_of_the_model_in_evaluation_mode():
    model = make_model()
    model(torch.randn(50, 4) + 1)  # statistics that differ from those of a batch
    expected = by_hand(model)
    reference = ReferenceLosses.measure(model, Counting(model), SIZE)
    np.testing.assert_allclose(reference.value, expected, atol=1e-6)
    assert len(reference.value) == SIZE and reference.value.dtype == torch.float32
    rows = torch.tensor([4, 0, 4, 22])
    np.testing.assert_allclose(reference(rows), expected[[4, 0, 4, 22]], atol=1e-6)
    assert not reference(rows).requires_grad
    for wrong in (-1, SIZE):
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            reference(torch.tensor([wrong]))


def test_the_model_is_left_as_it_was():
    model = make_model()
    model[1].eval()  # somebody froze the statistics
    model[3].weight.requires_grad_(False)
    before, modes = state_checksum(model), [module.training for module in model.modules()]
    assert True in modes and False in modes
    seen: list[Any] = []

    def batches() -> Iterator[Any]:
        for rows, value in Counting(model)():
            seen.append((model.training, torch.is_grad_enabled()))
            yield rows, value

    ReferenceLosses.measure(model, batches, SIZE)
    assert set(seen) == {(False, False)}
    assert [module.training for module in model.modules()] == modes
    assert state_checksum(model) == before and torch.is_grad_enabled()

    def fails() -> Iterator[Any]:
        yield torch.arange(3), torch.zeros(3)
        raise KeyError("no such sample")

    with pytest.raises(KeyError):
        ReferenceLosses.measure(model, fails, SIZE)
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()


def test_precision_and_device_follow_the_model_but_are_never_narrowed():
    model = make_model().bfloat16()
    rows = torch.arange(3)
    narrow = torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16)
    reference = ReferenceLosses.measure(model, lambda: [(rows, narrow)], 3)
    assert reference.value.dtype == torch.float32
    fine = torch.tensor([1 / 3, 2 / 3, 1.0], dtype=torch.float64)
    reference = ReferenceLosses.measure(model, lambda: [(rows, fine)], 3)
    assert torch.equal(reference.value, fine), "exactly"
    holder = nn.ModuleDict({"reference": reference, "model": model}).to(torch.bfloat16)
    assert torch.equal(holder["reference"](rows), fine)
    restored = ReferenceLosses(torch.zeros(3, dtype=torch.float64))
    restored.load_state_dict(reference.state_dict())
    assert torch.equal(restored.value, fine)
    fine[0] = 9.0
    assert reference.value[0] != 9, "a copy"


# What is refused.


@pytest.mark.parametrize("batches, message", [
    ([([0, 1], torch.ones(2)), ([4], torch.ones(1))], "but 2 are missing, first row 2"),
    ([], "but 5 are missing, first row 0"),
    ([([0, 1, 2, 3, 4], torch.ones(5)), ([3], torch.ones(1))],
     "1 occur more than once, first row 3"),
    ([([0, 1, 2, 3, 5], torch.ones(5))], "row 5 is not in 0, ..., 4"),
    ([([0, 1, 2, 3, -1], torch.ones(5))], "row -1 is not in 0, ..., 4"),
    ([([2, 0, 1], torch.ones(3)), ([4, 3], torch.tensor([1.0, torch.nan]))],
     "the loss of row 3 is nan (rows that are not finite: 1)"),
    ([([3, 2, 1, 0, 4], torch.tensor([torch.inf, 1.0, 1.0, -torch.inf, 1.0]))],
     "the loss of row 0 is -inf (rows that are not finite: 2)"),
    ([([0, 1], torch.ones(3))], "yields: (2,) torch.int64 and (3,)"),
    ([([0, 1], torch.ones(2, 1))], "and (2, 1)"),
    ([(torch.arange(5.0), torch.ones(5))], "(5,) torch.float32"),
])  # fmt: skip
def test_rows_and_values_are_checked(batches, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        ReferenceLosses.measure(nn.Linear(1, 1), lambda: batches, 5, data="x", cache=tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is kept of it"


def test_other_arguments(tmp_path):
    model, good = nn.Linear(1, 1), lambda: [(torch.arange(2), torch.ones(2))]
    with pytest.raises(ValueError, match=r"measure\(data=...\)` is needed with a cache"):
        ReferenceLosses.measure(model, good, 2, cache=tmp_path)
    with pytest.raises(ValueError, match=r"size=...\)` must be at least 1"):
        ReferenceLosses.measure(model, good, 0)
    with pytest.raises(ValueError, match=r"must be a generator function.*but is a list"):
        ReferenceLosses.measure(model, good(), 2)  # type: ignore[arg-type]
    for wrong in (torch.ones(2, 2), torch.ones(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"shape \(N,\)"):
            ReferenceLosses(wrong)
    with pytest.raises(ValueError, match="row 1 is nan"):
        ReferenceLosses(torch.tensor([0.0, torch.nan]))


# The file.


def file_of(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_the_second_time_nothing_is_computed(tmp_path):
    model = make_model()
    folder, source = tmp_path / "some" / "folder", Counting(model)
    measured = [
        ReferenceLosses.measure(model, source, SIZE, data=DATA, cache=folder) for _ in range(2)
    ]
    assert source.runs == 1
    assert torch.equal(measured[0].value, measured[1].value)
    content = torch.load(file_of(folder), weights_only=True)
    assert content["sha256"] == hashlib.sha256(measured[0].value.numpy().tobytes()).hexdigest()
    compiled: Any = torch.compile(model, backend="eager")
    ReferenceLosses.measure(compiled, source, SIZE, data=DATA, cache=str(folder))
    assert source.runs == 1, "the same model"


@pytest.mark.parametrize("change", ["a weight", "a statistic", "the data", "the size"])
def test_another_model_or_other_data_are_measured_again(change, tmp_path):
    model = make_model()
    source = Counting(model, torch.arange(SIZE))
    ReferenceLosses.measure(model, source, SIZE, data=DATA, cache=tmp_path)
    first = file_of(tmp_path)
    content = first.read_bytes()
    if change in ("a weight", "a statistic"):
        model.state_dict()["0.weight" if change == "a weight" else "1.running_mean"][0].add_(1e-6)
    size, data = SIZE - (change == "the size"), DATA + "!" * (change == "the data")
    source.order = torch.arange(size)
    again = ReferenceLosses.measure(model, source, size, data=data, cache=tmp_path)
    assert source.runs == 2 and len(again.value) == size
    assert len(list(tmp_path.iterdir())) == 2 and first.read_bytes() == content


@pytest.mark.parametrize("damage", ["cut", "a bit"])
def test_losses_of_a_damaged_file_are_measured_again(damage, tmp_path):
    model = make_model()
    source = Counting(model, torch.arange(SIZE))
    measure = lambda: ReferenceLosses.measure(model, source, SIZE, data=DATA, cache=tmp_path)  # noqa: E731
    kept, path = measure(), file_of(tmp_path)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    else:  # another value of a loss, in a file that torch still reads
        content[content.index(kept.value.numpy().tobytes()[:16]) + 1] ^= 1
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="measured again: .*reference-losses-"):
        again = measure()
    assert source.runs == 2 and torch.equal(again.value, kept.value)
    assert torch.equal(measure().value, kept.value) and source.runs == 2, "whole again"


# Checksums of models.


def test_state_checksum_by_hand():
    layer = nn.Linear(2, 1)
    digest = hashlib.sha256()
    for name, shape in (("bias", "(1,)"), ("weight", "(1, 2)")):
        digest.update(f"{name} torch.float32 {shape} ".encode())
        digest.update(layer.state_dict()[name].numpy().tobytes())
    assert state_checksum(layer) == digest.hexdigest()


# Ranks; test_distributed.py starts them.


def measured(rank: int, place: Path) -> dict[str, Any]:
    """What one of two ranks measures, under DDP, in several shares of the rows."""
    found: dict[str, Any] = {}
    model = nn.parallel.DistributedDataParallel(make_model())
    found["plain name"] = state_checksum(model) == state_checksum(make_model())
    shares = {"shared": torch.arange(SIZE).split([15, 8])[rank], "one": torch.arange(SIZE)}
    shares["one"] = shares["one"][: SIZE * (rank == 0)]
    for name, rows in shares.items():
        found[name] = ReferenceLosses.measure(model, Counting(model, rows), SIZE).value
    rounded = lambda: [(torch.arange(3), torch.ones(3) + rank)]  # noqa: E731
    found["everything"] = ReferenceLosses.measure(model, rounded, 3).value
    double = [(torch.arange(3), torch.full((3,), 1 / 3, dtype=torch.float64))] * (rank == 1)
    found["double"] = ReferenceLosses.measure(model, lambda: double, 3).value

    def caught(batches: Any) -> str:
        try:
            ReferenceLosses.measure(model, lambda: batches, 4)
        except ValueError as error:
            return str(error)
        return ""

    # An error on one rank is an error on all, so that none waits for it.
    spoiled = torch.tensor([1.0, torch.nan if rank == 1 else 1.0])
    found["nan"] = caught([(torch.tensor([rank, 2 + rank]), spoiled)])
    found["repeated"] = caught([(torch.tensor([rank, 3]), torch.ones(2))])
    # The second rank has a folder of its own, as on another machine.
    source, cache = Counting(model, shares["shared"]), place / f"cache{rank}"
    arguments: Any = {"data": DATA, "cache": cache}
    kept = [ReferenceLosses.measure(model, source, SIZE, **arguments).value for _ in range(2)]
    found["files"] = len(list(cache.iterdir())) if cache.exists() else 0
    found["runs"], found["kept"] = source.runs, kept
    return found


def check_ranks(results: list[dict[str, Any]]) -> None:
    model = make_model()
    expected = ReferenceLosses.measure(model, Counting(model), SIZE).value
    for found in results:
        assert found["plain name"]
        for value in (found["shared"], found["one"], *found["kept"]):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
        assert found["everything"].tolist() == [1.0] * 3, "those of the first rank"
        assert found["double"].tolist() == [1 / 3] * 3
        assert "row 3 is nan (rows that are not finite: 1)" in found["nan"]
        assert "more than once, first row 3. Ranks must share the rows" in found["repeated"]
        assert found["runs"] == 1
    assert [found["files"] for found in results] == [1, 0]
    for name in ("shared", "one", "double"):
        assert torch.equal(results[0][name], results[1][name])
