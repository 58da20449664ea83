"""sentence-transformers: contrastive training of large batches from small ones."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import TrainerCallback

from .. import _checks
from .._watch import warn
from ..tracker import for_model
from .open_clip import PairMemory, pair_numbers

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["GlobalContrastiveLoss", "number_pairs"]

_REMEDY = "Number the pairs by `train_dataset = number_pairs(train_dataset)`."


def number_pairs(dataset: Dataset, column: str = "label") -> Dataset:
    """Add the number of each pair, 0 to n - 1, which `GlobalContrastiveLoss` knows it by.

    After the last filter and split, since `num_pairs` is their number then. `column` is one of the
    names that the Trainer takes for labels: `label`, `labels`, `score`, `scores`.
    """
    from datasets import Dataset  # sentence-transformers does without, except for its Trainer

    if not isinstance(dataset, Dataset):
        raise TypeError(
            "`number_pairs(dataset=...)` must be a `datasets.Dataset`, whose rows have fixed "
            f"numbers, but is: {type(dataset).__name__}."
        )
    labels = {"label", "labels", "score", "scores"}
    taken = sorted(labels & set(dataset.column_names))
    if taken or column not in labels:
        raise ValueError(
            f"`number_pairs` cannot add the column `{column}`: the Trainer takes the first of "
            f"{', '.join(sorted(labels))} for the numbers"
            + (f", and the data have {taken} already; remove or rename it." if taken else ".")
        )
    return dataset.add_column(column, list(range(len(dataset))))  # type: ignore[call-arg]


class GlobalContrastiveLoss(nn.Module, TrainerCallback):
    r"""`MultipleNegativesRankingLoss` of large batches, from small ones.

    .. math::
        \frac1n\sum_{i=1}^n \log(1 + G_i), \qquad
        G_i = \frac{K}{n-1}\sum_{j \ne i} e^{(s_{ij} - s_{ii})/\tau}, \qquad
        s_{ij} = \cos(\text{anchor}_i, \text{positive}_j)

    K negatives stand for all others of the data set. A moving average over the visits of pair i
    follows G_i, from negatives in the batch and among the last `stored_pairs` pairs. Columns after
    the second are hard negatives of every anchor. The loss is also a callback of the Trainer, which
    saves the memory in every checkpoint, and must be among its `callbacks`.

    Args:
        model: the model.
        num_pairs: n, the number of rows of the training data; each row has its number as label, see
            `number_pairs`.
        temperature: tau, 1 / `scale` of `MultipleNegativesRankingLoss`.
        gamma: weight of the new sum in the average; 1 has no memory.
        symmetric: the mean of both directions.
        stored_pairs: how many of the last pairs keep their embeddings, as further negatives.
        negatives: K, at most n - 1; None is n - 1.
        in_trainer: False for a training loop of your own: save `loss.memory.state_dict()` there.
        name: of the file in checkpoints; give each loss of a Trainer its own.

    References:
        Z. Yuan et al., Provable stochastic optimization for global contrastive learning: small
        batch does not harm performance, 2022 (SogCLR: nothing stored, all negatives). X. Wang et
        al., Cross-batch memory for embedding learning, 2020 (stored embeddings as negatives).
    """

    def __init__(
        self, model: SentenceTransformer, num_pairs: int, temperature: float = 0.05,
        gamma: float = 0.8, symmetric: bool = False, stored_pairs: int = 1024,
        negatives: int | None = 1023, *, in_trainer: bool = True,
        name: str = "global_contrastive_loss",
    ) -> None:  # fmt: skip
        super().__init__()
        _checks.positive("GlobalContrastiveLoss", "temperature", temperature)
        self.model = model
        self.temperature, self.in_trainer, self.name = temperature, in_trainer, name
        like = for_model(model, 1).value
        self.memory = PairMemory(
            "GlobalContrastiveLoss", num_pairs, gamma, symmetric, stored_pairs, negatives,
            like.dtype, like.device,
        )  # fmt: skip
        self._run: str | None = None  # id of the run, in trainer_state.json and in each file
        self._loaded: tuple[str, int] | None = None  # run and step of the memory, if from a file
        self._width: int | None = None

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """The loss of anchors, positives and hard negatives; labels are the numbers of pairs."""
        columns = list(sentence_features)
        if len(columns) < 2:
            raise ValueError("`GlobalContrastiveLoss` needs two columns: anchor and positive.")
        index = None
        if self.training and torch.is_grad_enabled():
            if not self.model.training:
                raise RuntimeError(
                    "`GlobalContrastiveLoss`: the model is in `eval()` mode, where `encode` leaves "
                    "it, but the loss is not. Call `loss.train()` or `loss.eval()`."
                )
            if self.in_trainer and self._run is None:
                raise RuntimeError(
                    "`GlobalContrastiveLoss` must be among the callbacks of the Trainer, "
                    "`SentenceTransformerTrainer(..., loss=loss, callbacks=[loss])`, to save its "
                    "memory. In a loop of your own, pass `in_trainer=False`."
                )
            where = "`GlobalContrastiveLoss`: the label of the pairs"
            index = pair_numbers(labels, self.memory.num_pairs, where, _REMEDY)
        features = [self.model(column)["sentence_embedding"] for column in columns]
        width = features[0].shape[1]
        if index is not None:
            if self._width not in (None, width):
                raise ValueError(
                    f"`GlobalContrastiveLoss` has sums of width {self._width}, not {width}: "
                    "`MatryoshkaLoss` and the like cannot wrap it."
                )
            self._width = width
        dtype = torch.promote_types(features[0].dtype, torch.float32)
        with torch.autocast(features[0].device.type, enabled=False):
            features = [normalize(each.to(dtype), dim=1) for each in features]
        return self.memory(features, 1 / self.temperature, index)

    # Checkpoints.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # What a callback leaves in this dict is saved in trainer_state.json. It tells which of the
        # files of this name is the right one: the Trainer does not say where it resumes from.
        notes, key = state.stateful_callbacks, f"fcco.{self.name}"
        if state.global_step == 0:
            if key in notes:
                raise ValueError(
                    f"Two losses have the name {self.name!r}, one file in checkpoints: give each "
                    "`GlobalContrastiveLoss(name=...)` its own."
                )
            self._run = uuid.uuid4().hex
            notes[key] = {"run": self._run, "folder": str(Path(args.output_dir).resolve())}
            return
        if key not in notes:
            raise ValueError(
                f"The checkpoint of step {state.global_step} has no memory of {self.name!r}: this "
                "loss was not among the callbacks when it was saved."
            )
        wanted = (notes[key]["run"], state.global_step)
        for parent in (args.output_dir, notes[key]["folder"]):
            folder = Path(parent) / f"checkpoint-{state.global_step}"
            if self._loaded != wanted and (folder / f"{self.name}.pt").is_file():
                self.load_checkpoint(folder)
        if self._loaded != wanted:
            raise FileNotFoundError(
                f"{self.name}.pt of step {state.global_step} of this run is neither in "
                f"{args.output_dir} nor in {notes[key]['folder']}: before `trainer.train(...)`, "
                "call `loss.load_checkpoint(folder)` with the folder that you resume from."
            )
        self._run = wanted[0]

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        number = self.memory.num_pairs
        missing = int(self.memory.value[:, 0].isnan().sum())
        # Incomplete batches may be left out; and an epoch, by `max_steps`.
        few = args.train_batch_size * args.world_size + number // 10
        if state.epoch == 1 and missing > few:
            warn(
                f"{missing} of the `GlobalContrastiveLoss(num_pairs={number})` pairs were not in "
                "the first epoch. `num_pairs` must be the number of rows of the training data, "
                "and each row must have a number of its own; several data sets need a loss each."
            )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.should_save:
            file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / f"{self.name}.pt"
            origin = (self._run, state.global_step)
            torch.save({"origin": origin, "memory": self.memory.state_dict()}, file)

    def load_checkpoint(self, folder: str | Path) -> None:
        """Load the memory from the folder of a checkpoint that was moved before it is resumed."""
        saved = torch.load(Path(folder) / f"{self.name}.pt", map_location="cpu")
        self.memory.load_state_dict(saved["memory"])
        self._loaded = saved["origin"]

    def get_config_dict(self) -> dict[str, Any]:
        """For the model card."""
        names = "num_pairs", "gamma", "symmetric", "stored_pairs", "negatives"
        settings = {name: getattr(self.memory, name) for name in names}
        return {"temperature": self.temperature, **settings}
