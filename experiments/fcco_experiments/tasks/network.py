"""What tasks on images, texts and vectors share: a network, its inputs, its start, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fcco.groups import GroupBatchSampler

from .. import backbones, environment
from ..data.grouped import GroupedData, GroupedPart, Samples, Vectors
from ..task import Problem
from .base import BaseTraining, OnMachine, autocast, perceptron


@dataclass(frozen=True, kw_only=True)
class Networked(OnMachine):
    """The network of an experiment.

    Args:
        train: `"head"` trains a head on features of the frozen backbone, computed once and kept in
            the cache; `"all"` trains every weight.
        batch_norm: `"frozen"` keeps the statistics of the pretrained backbone; `"batch"` takes
            those of each batch, as training from random weights must.
    """

    backbone: str = "none"  # the network in front of the head; "none" for data that are vectors
    train: Literal["head", "all"] = "head"
    pretrained: bool = True  # start the backbone from pretrained weights
    weights: str = ""  # file of those weights; the backbone's own unless given
    hidden: tuple[int, ...] = ()  # widths of hidden layers of the head; none makes it linear
    size: tuple[int, int] = (128, 104)  # height and width that images are scaled to
    tokens: int = 128  # texts are cut after so many
    batch_norm: Literal["frozen", "batch"] = "frozen"

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        super().__post_init__()
        self.at_least(1, "tokens")
        if min(self.size) < 1:
            raise ValueError(f"`size` must be a height and a width but is: {list(self.size)}.")
        if not all(width >= 1 for width in self.hidden):
            raise ValueError(f"`hidden` must hold widths from 1 on but is: {list(self.hidden)}.")
        if self.backbone == "none" and self.train == "all" and not self.hidden:
            raise ValueError("`train: all` needs a `backbone` (or `hidden` layers).")

    @property
    def on_vectors(self) -> bool:
        """Whether what is trained takes vectors: features, or data that are vectors."""
        return self.train == "head" or self.backbone == "none"

    def kind_problem(self) -> list[tuple[tuple[str, ...], str]]:
        """What is wrong with the name of the backbone, for `Task.check`."""
        try:
            self.kind  # noqa: B018
        except ValueError as error:
            return [(("backbone",), str(error))]
        return []

    @property
    def kind(self) -> Literal["image", "text", "vector"]:
        """What the backbone takes."""
        return "vector" if self.backbone == "none" else backbones.kind(self.backbone)


class Classifier(nn.Module):
    """Scores of the classes: a head on a backbone, or on batches that are vectors."""

    def __init__(
        self, backbone: nn.Module | None, width: int, hidden: Sequence[int], classes: int
    ) -> None:
        super().__init__()
        self.backbone = nn.Identity() if backbone is None else backbone
        self.top = nn.Sequential(*perceptron(width, hidden, classes))

    def forward(self, batch: Tensor) -> Tensor:
        return self.top(self.backbone(batch))


def standardise(values: Tensor, rows: Tensor) -> Tensor:
    """Vectors scaled to mean 0 and deviation 1 over the given rows, column by column, in float32.

    Columns that hardly vary there are only centred.
    """
    result = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    # 128 columns at a time: float64 for all of them would be four times the memory of the data.
    for columns, scaled in zip(values.split(128, 1), result.split(128, 1), strict=True):
        wide = columns.double()
        mean, deviation = wide[rows].mean(0), wide[rows].std(0)
        scale = torch.where(deviation > 1e-6, deviation, torch.ones_like(deviation))
        scaled.copy_((wide - mean) / scale)
    return result


class NetworkProblem(Problem):
    """Samples in parts, of the kind that the backbone takes, and the network for them."""

    config: Any

    def __init__(self, config: Networked, data: GroupedData, outputs: int) -> None:
        if config.kind != data.kind:
            raise ValueError(
                f"`backbone: {config.backbone}` takes data of the kind {config.kind}, but "
                f"{config.data} is of the kind {data.kind}."
            )
        self.config, self.data, self.outputs = config, data, outputs
        self.device = environment.device(config.device)
        self.samples = self._samples()
        self._parts: dict[int, Mapping[str, GroupedPart]] = {}
        if not config.on_vectors:
            self.network()  # weights that are nowhere to be had end it here

    def _samples(self) -> Samples:
        """What batches are made of: features, token ids, images or vectors."""
        config = self.config
        if config.backbone == "none":
            return self.data.samples
        if config.train == "head":
            return backbones.features(
                config.backbone, self.data, pretrained=config.pretrained, weights=config.weights,
                size=config.size, tokens=config.tokens, device=self.device,
            )  # fmt: skip
        return backbones.encode(
            config.backbone, self.data.samples, tokens=config.tokens, weights=config.weights
        )

    def parts(self, seed: int) -> Mapping[str, GroupedPart]:
        """Training, validation and test data of a seed."""
        if seed not in self._parts:
            self._parts[seed] = self.data.cut(seed)
        return self._parts[seed]

    def begin(self, seed: int, *, scale: bool = True) -> tuple[nn.Module, Samples]:
        """The network with its first weights, the same for every method, and what it takes.

        Vectors are standardised by the training rows, unless `scale` is false.
        """
        samples, vectors = self.samples, self.config.on_vectors
        if isinstance(samples, Vectors):
            values = samples.values
            if vectors and scale:
                values = standardise(values, self.parts(seed)["train"].rows)
            samples = Vectors(values.to(self.device))
        torch.manual_seed(seed)
        if vectors:
            first: Any = samples[0]
            model = Classifier(None, len(first), self.config.hidden, self.outputs)
        else:
            model = self.network()
        return model.to(self.device), samples

    def network(self) -> Classifier:
        """The backbone, with its first weights, and a head on top."""
        config = self.config
        backbone = backbones.build(
            config.backbone, pretrained=config.pretrained, weights=config.weights, size=config.size,
            tokens=config.tokens, batch_norm=config.batch_norm,
        )  # fmt: skip
        return Classifier(backbone, backbone.width, config.hidden, self.outputs)

    def fingerprint(self) -> str:
        return self.data.fingerprint


class NetworkTraining(BaseTraining):
    """A run of a network of this kind."""

    def scores(self, inputs: Tensor) -> Tensor:
        """What the network makes of inputs, in float32."""
        with autocast(self.config, self.device):
            scores = self.model(inputs)
        return scores if self.config.precision == "float32" else scores.float()


# Batches.


class _Rows(Dataset[tuple[Tensor, int]]):
    """Samples with their places, for a loader with worker processes."""

    def __init__(self, samples: Samples, rows: Tensor) -> None:
        self.samples, self.rows = samples, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        sample = self.samples[int(self.rows[place])]
        assert isinstance(sample, Tensor), "texts are encoded before"
        return sample, place


def loader(
    config: OnMachine,
    samples: Samples,
    rows: Tensor,
    batches: Iterable[list[int]],
    device: torch.device,
    *,
    persistent: bool = False,
) -> DataLoader[Any]:
    """A loader of (inputs, places) for batches of places; `rows` holds the row of each place.

    With `persistent` its worker processes are kept from one pass to the next.
    """
    return DataLoader(
        _Rows(samples, rows),
        batch_sampler=batches,
        num_workers=config.loaders,
        pin_memory=config.loaders > 0 and device.type == "cuda",
        persistent_workers=persistent and config.loaders > 0,
        generator=torch.Generator(),  # or each pass would draw from the global one
    )


def chunks(
    config: OnMachine,
    samples: Samples,
    rows: Tensor,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Places with their inputs, for evaluation."""
    pieces = torch.arange(len(rows)).split(config.evaluate_batch)
    if isinstance(samples, Vectors):
        values = samples.values
        for piece in pieces:
            yield piece, values[rows[piece].to(values.device)].to(device)
        return
    loaded = loader(config, samples, rows, [piece.tolist() for piece in pieces], device)
    for piece, (inputs, _) in zip(pieces, loaded, strict=True):
        yield piece, inputs.to(device, non_blocking=True)


@torch.no_grad()
def per_sample(
    config: OnMachine,
    samples: Samples,
    rows: Tensor,
    device: torch.device,
    function: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """What `function` makes of inputs and their places, (b, k), for all rows."""
    pieces = chunks(config, samples, rows, device)
    return torch.cat([function(inputs, places.to(device)) for places, inputs in pieces])


class Batches:
    """An endless stream of batches that can be resumed.

    A batch joins what one or several samplers draw, each from a stream of rows of its own: `rows`
    holds the row of each place of each stream. `Vectors` are indexed in memory, other samples read
    by a loader.
    """

    def __init__(
        self,
        config: OnMachine,
        samples: Samples,
        rows: Sequence[Tensor],
        samplers: Sequence[GroupBatchSampler],
        device: torch.device,
    ) -> None:
        self.config, self.samples, self.device = config, samples, device
        self.samplers, self._rows = list(samplers), torch.cat(list(rows))
        self._ends = torch.tensor([len(stream) for stream in rows]).cumsum(0)
        self._starts = [0, *self._ends[:-1].tolist()]
        self._loaded: Iterator[tuple[Tensor, Tensor]] | None = None
        for sampler in self.samplers:
            sampler.advance(0)  # what loaders have read ahead does not count as used

    def draw(self) -> tuple[Tensor, list[Tensor]]:
        """The inputs of the next batch, and its places in each stream (on the CPU)."""
        if isinstance(self.samples, Vectors):
            places = [torch.tensor(sampler.draw()) for sampler in self.samplers]
            values = self.samples.values
            rows = self._rows[self._joined(places)].to(values.device)
            return values[rows].to(self.device), places
        if self._loaded is None:
            self._loaded = self._load()
        inputs, joined = next(self._loaded)
        sizes = torch.bincount(
            torch.bucketize(joined, self._ends, right=True), minlength=len(self._starts)
        )
        places = joined.split(sizes.tolist())
        return inputs.to(self.device, non_blocking=True), [
            stream - start for stream, start in zip(places, self._starts, strict=True)
        ]

    def _joined(self, places: Sequence[Tensor]) -> Tensor:
        """Places in the streams as places in all of them, one after the other."""
        pairs = zip(places, self._starts, strict=True)
        return torch.cat([stream + start for stream, start in pairs])

    def __iter__(self) -> Iterator[list[int]]:
        """Joined places of the batches that are left in this epoch, for a loader."""
        for drawn in zip(*self.samplers, strict=True):
            yield self._joined([torch.tensor(places) for places in drawn]).tolist()

    def _load(self) -> Iterator[tuple[Tensor, Tensor]]:
        loaded = loader(self.config, self.samples, self._rows, self, self.device, persistent=True)
        while True:
            for inputs, joined in loaded:
                for sampler in self.samplers:
                    sampler.advance()
                yield inputs, joined

    def state_dict(self) -> dict[str, Any]:
        """How many batches were drawn."""
        return {"samplers": [sampler.state_dict() for sampler in self.samplers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after those draws."""
        for sampler, saved in zip(self.samplers, state["samplers"], strict=True):
            sampler.load_state_dict(dict(saved))
        self._loaded = None
