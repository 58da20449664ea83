"""The Trainer of Hugging Face for objectives over groups or constraints."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Sampler, Subset
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_MODELS,
)
from transformers.trainer import Trainer
from transformers.trainer_utils import get_last_checkpoint
from transformers.training_args import ParallelMode
from transformers.utils import is_datasets_available

from .. import _checks
from ..constraints import ConstrainedObjective
from ..groups import GroupBatchSampler, GroupMemberships, HoldOut
from ..index import read_names
from ..inputs import Measured, split
from ..objective import Compositional
from ..previous import unwrap
from ._shared import log_values, report_of

__all__ = ["RobustTrainer", "classification_losses", "log_values", "token_losses"]

Losses = Callable[[Any, Mapping[str, Any]], Any]
"""(outputs of the model, inputs) -> a loss for each example, or a pair (loss, values)."""

Parts = list[tuple[NDArray[np.int64], GroupBatchSampler]]
"""Examples by number, and a sampler of places among them."""

FILE = "objective.pt"  # of a checkpoint, with the objective
GROUP_INDEX = "group_index"  # the key of a batch with the numbers of all groups of each example
DRAWN_FOR = "_drawn_for_group"  # in an example of several groups: that which it is drawn for


class RobustTrainer(Trainer):
    """A `transformers.Trainer` that minimises an objective of `fcco`.

    `groups`, a column of the training set, says to which group or constraint an example belongs;
    `group_names` has its values in the order in which they are numbered.

    Args:
        args: arguments of the Trainer, also by name in `kwargs`.
        objective: a function (model, optimizer) -> objective, called when the Trainer has made its
            optimizer and, on several processes, wrapped the model by DDP.
        groups: a column of `train_dataset`. None in it means that the example has no group, which
            constrained objectives allow; a list, that it is in several.
        losses: a function (outputs, inputs) -> losses of the examples, shape (B,), or, for
            constrained objectives, a pair of the loss g0 (per example, or a scalar) and values
            (B,). Unless given: `classification_losses`, or `token_losses` for language models.
        loss_on: for constrained objectives and `losses` that are no pair: whether g0 is the mean
            loss of `"all"` examples of a batch, or of those that are `"ungrouped"`, while the
            others count in their constraint alone.
        columns: further columns that `losses` finds in its inputs; the model does not get them.
        sampler: `"groups"` fills batches with equally many examples of some groups, see
            `GroupBatchSampler`; None leaves the order to the Trainer.
        groups_per_batch: groups in a batch, on all devices together. Unless given, as many as it
            has room for with two examples of each.
        ungrouped_share: part of a batch that has no group, where there are such examples. An epoch
            is one pass over them.
        holdout: share of each group that is set apart: the values of a step come from these
            examples, without gradient, and the gradient from the others, see `HoldOut`. A batch
            has as many of them besides.
    """

    # The loss is a mean over the micro-batch: Trainer divides it by their number.
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        *args: Any,
        objective: Callable[[nn.Module, torch.optim.Optimizer], Compositional],
        groups: str,
        losses: Losses | None = None,
        loss_on: Literal["all", "ungrouped"] = "all",
        columns: Sequence[str] = (),
        sampler: Literal["groups"] | None = "groups",
        groups_per_batch: int | None = None,
        ungrouped_share: float = 0.5,
        holdout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        if not callable(objective) or isinstance(objective, nn.Module):
            raise TypeError(
                "`RobustTrainer(objective=...)` must be a function of the model and the optimizer "
                f"but is: {type(objective).__name__}."
            )
        _checks.one_of("RobustTrainer", "loss_on", loss_on, ("all", "ungrouped"))
        if sampler is not None:
            _checks.one_of("RobustTrainer", "sampler", sampler, ("groups",))
        _checks.in_interval("RobustTrainer", "holdout", holdout, 0.0, 1.0, open_high=True)
        if holdout and sampler is None:
            raise ValueError("`RobustTrainer(holdout=...)` needs `sampler='groups'`.")
        super().__init__(*args, **kwargs)
        # As `loss_is_scaled_for_ga`, for versions without it; and no items are counted.
        self.model_accepts_loss_kwargs = False
        self.objective: Compositional | None = None
        self._factory, self._losses, self._columns = objective, losses, tuple(columns)
        self._loss_on, self._sampler, self._column = loss_on, sampler, groups
        self._place = f"`RobustTrainer(groups={groups!r})`"
        self._saved: dict[str, Any] | None = None  # of the checkpoint to resume from
        self._refuse_settings(groups_per_batch)
        names = [_names(value) for value in _column(self._place, self.train_dataset, groups)]
        self.group_names = read_names(self._place, names)[1]
        numbers = {name: number for number, name in enumerate(self.group_names)}
        self._groups = [sorted(numbers[name] for name in own) for own in names]  # of each example
        self._alone = [row for row, own in enumerate(self._groups) if not own]
        # The example of each membership in a group, and after them examples without a group.
        self._rows = np.array([row for row, own in enumerate(self._groups) for _ in own]
                              + self._alone)  # fmt: skip
        self._ids = np.array([number for own in self._groups for number in own])
        self._overlap = len(self._rows) > len(self._groups)
        if loss_on == "ungrouped" and (sampler is None or not self._alone):
            raise ValueError(
                "`RobustTrainer(loss_on='ungrouped')` needs examples with None in the column "
                f"{groups!r}, and `sampler='groups'`."
            )
        self._held = HoldOut(self._groups, holdout, self.batch_seed) if holdout else None
        if sampler is not None:
            self._parts = self._samplers(groups_per_batch, ungrouped_share)
        inputs = {"label", "label_ids", *self.label_names}  # may be the groups, too
        hidden = {groups, *self._columns, DRAWN_FOR} - inputs
        self.data_collator = _Collator(self.data_collator, groups, numbers, self._columns, hidden)

    @property
    def _batch_size(self) -> int:
        return self.args.per_device_train_batch_size * self.args.world_size

    def _refuse_settings(self, groups_per_batch: int | None) -> None:
        """Refuse what is asked for and would not be done."""
        args, ours = self.args, self._sampler is not None
        accelerator: Any = args.accelerator_config
        settings = args.to_dict()  # has only those that this version knows
        order = settings.get("train_sampling_strategy", "random")
        ignored = {
            "compute_loss_func": self.compute_loss_func is not None,
            "label_smoothing_factor": args.label_smoothing_factor != 0,
            "auto_find_batch_size": args.auto_find_batch_size,
            "dataloader_drop_last": ours and args.dataloader_drop_last,
            "group_by_length": ours and settings.get("group_by_length", False),
            f"train_sampling_strategy={order!r}": ours and order != "random",
            "accelerator_config.split_batches": ours and accelerator.split_batches,
            "groups_per_batch": not ours and groups_per_batch is not None,
            "nn.DataParallel": args.n_gpu > 1,
        }
        for name in (name for name, given in ignored.items() if given):
            raise ValueError(
                f"`RobustTrainer` does not follow `{name}`; leave it out: `losses=` and `sampler=` "
                "say what is trained on; several GPUs need a process each, `torchrun`."
            )

    # The objective.

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer, and the objective on it; load the objective of a checkpoint."""
        super().create_optimizer(*args, **kwargs)
        distributed = self.args.parallel_mode == ParallelMode.DISTRIBUTED
        if distributed and not self._shards and self.model_wrapped is self.model:
            # Now rather than a little later: an objective that evaluates at w_{t-1} must know the
            # DDP module, whose flags such a pass changes.
            self.model_wrapped = self.accelerator.prepare(self.model)
        objective: Any = self.objective
        if objective is None or unwrap(objective.optimizer) is not unwrap(self.optimizer):
            objective = self._built(self._factory(self.model_wrapped, self.optimizer))
            if self._shards:  # the model may be moved later
                self._refuse_second_pass(objective)
                objective.to(self.args.device)
            # Methods with a double loop, or that switch, have an optimizer around the given one.
            self.objective, self.optimizer = objective, objective.optimizer  # type: ignore
        if self._saved is not None:
            objective.load_state_dict(self._saved["objective"])
            self._restore(self._saved)
        return self.optimizer

    @property
    def _shards(self) -> bool:
        """Whether parameters are divided over processes, and replaced after `create_optimizer`."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def _refuse_second_pass(self, objective: Compositional) -> None:
        wraps = objective.optimizer is not self.optimizer
        if wraps or objective.previous is not None:
            raise ValueError(
                f"`RobustTrainer(objective=...)`: the method {objective.method!r} "
                f"{'has an optimizer of its own' if wraps else 'evaluates at earlier weights'}, "
                "which FSDP and DeepSpeed replace; the defaults of `constrained` and "
                "`CVaRGroupDRO` do not."
            )

    def _built(self, objective: Any) -> Compositional:
        call = "`RobustTrainer(objective=...)` must return"
        if not isinstance(objective, Compositional) or len(objective.terms) > 1:
            found = type(objective).__name__
            raise TypeError(f"{call} an objective with one term but returned: {found}.")
        number, names = objective.term.tracker.num_inner, self.group_names
        if number != len(names):
            place = f"the {len(names)} groups in the column {self._column!r}"
            raise ValueError(f"{call} an objective for {place} but it has {number}.")
        term, words = objective.term, tuple(map(str, names))
        numbered = names == list(range(number))  # the column says which constraint by its number
        if term.names is not None and not numbered and term.names != words:
            order = f"the order of the column {self._column!r}, {names}"
            raise ValueError(f"{call} constraints in {order}, but they are: {[*term.names]}.")
        constrained = isinstance(objective, ConstrainedObjective)
        if term.names is None:  # in reports and errors
            term.names = term.tracker.names = words
            if constrained:
                term.limits.names = words
        if not constrained and self._alone:
            kind = type(objective).__name__
            raise ValueError(f"{self._place} has None, but {kind} needs the group of each example.")
        return objective

    # The loss.

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, *_: Any, **__: Any
    ) -> Any:
        """The objective's loss in training; otherwise the mean loss of the examples."""
        inputs = dict(inputs)
        groups = inputs.pop(GROUP_INDEX, None)
        outputs: Any = None

        def result(inputs: Mapping[str, Any] = inputs) -> Any:
            nonlocal outputs
            outputs = self._outputs(model, inputs)
            return (self._losses or self._default_losses)(outputs, inputs)

        if model.training and torch.is_grad_enabled():
            loss = self._training_loss(result, inputs, groups)
        else:
            loss, values = split(result())
            if loss is None:
                loss = values.value if isinstance(values, Measured) else values
            loss = loss.mean()
        return (loss, outputs) if return_outputs else loss

    def _outputs(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        return model(**{k: v for k, v in inputs.items() if k not in self._columns})

    def _training_loss(
        self, result: Callable[[Any], Any], inputs: dict[str, Any], groups: Any
    ) -> Tensor:
        objective: Any = self.objective
        if groups is None:
            raise ValueError(
                f"A batch has examples without the column {self._column!r} of `groups=`, or with "
                "other values in it: by a transform of the dataset, or another collator?"
            )
        apart: dict[str, Any] = {}  # what `_Batches` has put at the end
        if self._held is not None:
            size, first = len(groups), (len(groups) + groups.count([])) // 2
            apart, inputs = (
                {k: v[own] if np.shape(v)[:1] == (size,) else v for k, v in inputs.items()}
                for own in (slice(first, None), slice(first))
            )
            groups = groups[:first]
        grouped = _places([k for k, own in enumerate(groups) if own])
        ungrouped = _places([k for k, own in enumerate(groups) if not own])
        index: list[Any] = [own for own in groups if own]
        if all(len(own) == 1 for own in index):
            index = [own[0] for own in index]
        constrained = isinstance(objective, ConstrainedObjective)

        def entries() -> Any:
            loss, values = split(result(inputs))
            parts = values if isinstance(values, Measured) else (values,)
            if any(part.shape[:1] != (len(groups),) for part in parts):
                raise ValueError(
                    f"`RobustTrainer(losses=...)` must return a value for each of {len(groups)} "
                    f"examples, no mean, but the shape is: {tuple(parts[0].shape)}."
                )
            if loss is None and constrained:
                loss = values[ungrouped] if self._loss_on == "ungrouped" else values
            if [] in groups:
                values = tree_map_only(Tensor, lambda each: each[grouped], values)
            return values if loss is None else (loss, values)

        if apart:
            return objective(lambda: split(result(apart))[1], index, gradient=entries)
        return objective(entries, index)

    def _default_losses(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        # The Transformers model inside of DDP, PEFT or a module of the user.
        whole: Any = self.model
        model = next((m for m in whole.modules() if isinstance(m, PreTrainedModel)), None)
        name = type(model or whole).__name__
        causal = name.endswith("ForCausalLM") or name in CAUSAL_MODELS.values()
        logits: Any = outputs.get("logits") if isinstance(outputs, Mapping) else None
        given = (logits, inputs.get("labels"))
        shapes: list[Any] = [each.shape if isinstance(each, Tensor) else () for each in given]
        match [len(shape) for shape in shapes]:
            # One output is for regression.
            case 2, 1 if shapes[0][1] > 1 and not inputs["labels"].is_floating_point():
                return classification_losses(outputs, inputs)
            case 3, 2 if model is not None and model.config.is_encoder_decoder:
                return token_losses(outputs, inputs, shift=False)
            case 3, 2 if model is not None and causal:
                return token_losses(outputs, inputs)
        raise ValueError(
            "`RobustTrainer(losses=...)` is needed, a function (outputs, inputs) -> (B,) losses: "
            "what is known are classification and language models with `logits` and `labels`, not "
            f"{name} with logits and labels of shapes {[tuple(shape) for shape in shapes]}."
        )

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the model may be called here without `compute_loss`."""
        inputs = {k: v for k, v in inputs.items() if k != GROUP_INDEX}
        return super().prediction_step(model, inputs, *args, **kwargs)

    # Batches.

    def _set_signature_columns_if_needed(self) -> None:
        # The columns that survive `remove_unused_columns`.
        super()._set_signature_columns_if_needed()
        kept = list(self._signature_columns or ())
        own = [self._column, *self._columns, DRAWN_FOR]
        self._signature_columns = kept + [name for name in own if name not in kept]

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The Trainer's loader, with batches of groups, each process its part of them."""
        loader: Any = super().get_train_dataloader()
        if self._sampler is None:
            return loader
        data = loader.dataset
        if self._overlap:  # an example for each of its groups, and those without one
            members = GroupMemberships(data, self._groups, key=DRAWN_FOR)
            data = ConcatDataset([members, Subset(data, self._alone)])
        kept = ("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "prefetch_factor",
                "multiprocessing_context", "persistent_workers")  # fmt: skip
        # Not prepared by Accelerate, which would divide the batches over the processes once more.
        return DataLoader(
            data,
            batch_sampler=_Batches(self, self._parts),
            **{name: getattr(loader, name) for name in kept},
        )

    def _samplers(self, groups_per_batch: int | None, share: float) -> Parts:
        """Examples with a group and their sampler, and those without one and theirs."""
        size, own, alone = self._batch_size, len(self._ids), len(self._alone)
        ungrouped = round(share * size) if alone else 0
        if alone and not 0 < ungrouped < size:
            call = f"`RobustTrainer(ungrouped_share={share})`"
            raise ValueError(f"{call} leaves {ungrouped} of a batch of {size} without a group.")
        make = functools.partial(  # the whole batch: `_Batches` divides it
            GroupBatchSampler, batches_per_epoch=math.ceil(alone / ungrouped) if alone else None,
            seed=self.batch_seed, rank=0, world_size=1,
        )  # fmt: skip
        items = np.arange(len(self._rows)) if self._overlap else self._rows
        kept = np.arange(own)
        if self._held is not None:
            kept = kept[np.isin(self._rows[:own], self._held.rest)]
        shape: dict[str, Any] = {"batch_size": size - ungrouped}
        if groups_per_batch is not None:
            each = (size - ungrouped) // max(groups_per_batch, 1)
            most = int(np.bincount(self._ids[kept]).max())
            shape = {"groups_per_batch": groups_per_batch, "per_group": min(each, most)}
        parts = [(items[kept], make(self._ids[kept], **shape))]
        if alone:
            parts.append((items[own:], make(np.zeros(alone, int), 1, ungrouped)))
        return parts

    def _same(self, drawn: list[int], generator: torch.Generator) -> NDArray[np.int64]:
        """Examples set apart, of the groups of those that are drawn."""
        if self._held is None:
            return np.empty(0, np.int64)
        own, number = len(self._ids), len(self.group_names)
        kept = np.flatnonzero(np.isin(self._rows[:own], self._held.rest))
        groups = self._ids[kept[drawn]]
        rows = self._held.draw(torch.from_numpy(groups), generator).numpy()
        if not self._overlap:
            return rows
        return np.searchsorted(self._rows[:own] * number + self._ids, rows * number + groups)

    @property
    def batch_seed(self) -> int:
        """The seed of the batches."""
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    # Checkpoints.

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, or resume from a checkpoint of this class, with the state of the objective."""
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        self._saved = self._read(Path(folder)) if folder else None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._saved = None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model and, while training, the objective beside it (as in checkpoints)."""
        super().save_model(output_dir, _internal_call)
        resumable = self.is_in_train and not self.args.save_only_model
        if self.objective is not None and self.args.should_save and resumable:
            state = {"objective": self.objective.state_dict(), "batches": self._batches}
            state |= self._kept()
            folder: Any = output_dir or self.args.output_dir
            torch.save(state, Path(folder) / FILE)

    def _kept(self) -> dict[str, Any]:
        """What a subclass keeps in a checkpoint beside the objective; `_restore` reads it."""
        return {}

    def _restore(self, state: Mapping[str, Any]) -> None: ...

    @property
    def _batches(self) -> dict[str, Any]:
        """What, beside the epoch and its batch number, says which examples come next."""
        column = repr(self.group_names).encode() + self._rows.tobytes() + self._ids.tobytes()
        same = {
            "sampler": self._sampler,
            "examples set apart": 0 if self._held is None else len(self._held.apart),
            "seed": self.batch_seed,
            "gradient_accumulation_steps": self.args.gradient_accumulation_steps,
            "examples": len(self._groups),
            "examples in a batch": self._batch_size,
            f"checksum of the column {self._column!r}": zlib.crc32(column),
        }
        if self._sampler is not None:
            samplers = [sampler for _, sampler in self._parts]
            same["groups_per_batch"] = [sampler.groups_per_batch for sampler in samplers]
            same["per_group"] = [sampler.per_group for sampler in samplers]
        return same

    def _read(self, folder: Path) -> dict[str, Any]:
        path, call = folder / FILE, "`RobustTrainer.train(resume_from_checkpoint=...)`"
        if not path.is_file():
            raise ValueError(
                f"{call} needs {FILE} in {folder}, which this class writes without "
                "`save_only_model`. To start from its weights, load them into the model."
            )
        state = torch.load(path, map_location="cpu", weights_only=True)
        was, now = state["batches"], self._batches
        changed = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        other = [f"{name} was {was.get(name)}, is {now.get(name)}" for name in changed]
        if other:
            other_batches = f"the checkpoint in {folder} was made with other batches"
            raise ValueError(f"{call}: {other_batches}: {'; '.join(other)}.")
        return state

    # Reports.

    def report(self, **options: Any) -> Any:
        """`objective.report(**options)`, with the names of the groups."""
        objective: Any = self.objective
        if objective is None:
            raise ValueError("`RobustTrainer.report()` needs an objective: `train()` makes it.")
        return objective.report(**options)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with some figures of the report beside a training loss."""
        objective = self.objective if "loss" in logs else None
        report = None if objective is None else report_of(objective)
        if report is not None:
            logs |= self._figures(report)
        super().log(logs, *args, **kwargs)

    def _figures(self, report: Any) -> dict[str, float]:
        return log_values(report)


def classification_losses(outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Cross-entropy of each example, of `logits`, (B, C), and `labels`, (B,).

    It is NaN, which objectives refuse, for the label -100 (ignore).
    """
    labels = inputs["labels"]
    losses = cross_entropy(_logits(outputs), labels, reduction="none")
    return losses.masked_fill(labels == -100, math.nan)  # 0 would count as a good example


def token_losses(outputs: Any, inputs: Mapping[str, Any], *, shift: bool = True) -> Tensor:
    """Mean cross-entropy of the tokens of each example, of `logits`, (B, T, V), and `labels`.

    Tokens with the label -100 do not count; it is NaN, which objectives refuse, without any other.
    With `shift` the logits at a place are for the token after it, as in causal models.
    """
    logits, labels = _logits(outputs), inputs["labels"]
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none")  # 0 where ignored
    return losses.sum(1) / (labels != -100).sum(1)


def _logits(outputs: Any) -> Tensor:
    # In 32 bits at least: differences of losses are taken.
    logits: Tensor = outputs["logits"]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


# The column of the groups.


def _names(value: Any) -> list[Any]:
    """The groups of an example."""
    if isinstance(value, (Tensor, np.generic, np.ndarray)):
        value = value.tolist()
    names = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
    return [name for name in names if name is not None]


def _places(numbers: list[int]) -> Any:
    """A slice where they follow each other, as in batches of groups: the GPU gets no index."""
    first = numbers[0] if numbers else 0
    own = slice(first, first + len(numbers))
    return own if numbers == [*range(own.start, own.stop)] else numbers


def _column(place: str, dataset: Any, name: str) -> Iterable[Any]:
    """A column of a dataset."""
    if dataset is None or isinstance(dataset, IterableDataset):
        kind = type(dataset).__name__
        raise TypeError(f"{place} needs a `train_dataset` with a length but it is: {kind}.")
    first = dataset[0]
    if not isinstance(first, Mapping) or name not in first:
        there = list(first) if isinstance(first, Mapping) else type(first).__name__
        raise ValueError(f"{place}: no such column in `train_dataset`, which has: {there}.")
    if is_datasets_available():
        import datasets

        if isinstance(dataset, datasets.Dataset):  # without reading the other columns
            return dataset.with_format(None)[name]
    return (dataset[k][name] for k in range(len(dataset)))


class _Collator(NamedTuple):
    """A data collator that hides some columns from another one and adds them to its batch."""

    collator: Callable[[list[Any]], Any]
    groups: str  # the column of the groups; their numbers come under `GROUP_INDEX`
    numbers: Mapping[Any, int]  # of the groups
    columns: Sequence[str]  # further ones, which stay what they are
    hidden: set[str]

    def __call__(self, examples: list[Any]) -> Any:
        if not all(isinstance(each, Mapping) for each in examples):
            return self.collator(examples)
        batch = self.collator(
            [{k: v for k, v in each.items() if k not in self.hidden} for each in examples]
        )
        # Python's numbers stay on the host, where the objective needs them.
        index = [self._groups_of(each) for each in examples]
        if None not in index:
            batch[GROUP_INDEX] = index
        for name in self.columns:
            if all(name in each for each in examples):
                batch[name] = torch.stack([torch.as_tensor(each[name]) for each in examples])
        return batch

    def _groups_of(self, example: Mapping[str, Any]) -> list[int] | None:
        """None for an example of other data: without the column, or of a group not known."""
        if DRAWN_FOR in example:
            return [example[DRAWN_FOR]]
        if self.groups not in example:
            return None
        names = _names(example[self.groups])
        return [self.numbers[each] for each in names] if self.numbers.keys() >= {*names} else None


class _Batches(Sampler[list[int]]):
    """This process's part of the batches of the Trainer's epoch, from the first on.

    Which these are depends on (seed, epoch, batch number) alone. The epoch is asked for when an
    iteration begins; when training is resumed, the Trainer itself skips the batches that it had.
    """

    def __init__(self, trainer: RobustTrainer, parts: Parts) -> None:
        self._trainer, self._parts = trainer, parts

    def __len__(self) -> int:
        return len(self._parts[0][1])

    def __iter__(self) -> Iterator[list[int]]:
        args, epoch = self._trainer.args, int(self._trainer.state.epoch or 0)
        for number, (_, sampler) in enumerate(self._parts):
            start = {"seed": self._trainer.batch_seed + number, "epoch": epoch, "consumed": 0}
            sampler.load_state_dict(start)
        generator = torch.Generator().manual_seed(1_000_003 * self._trainer.batch_seed + epoch)
        mine = slice(args.process_index, None, args.world_size)
        for drawn in zip(*(sampler for _, sampler in self._parts), strict=True):
            batch = [items[part] for (items, _), part in zip(self._parts, drawn, strict=True)]
            # Every so many-th: each process gets both kinds of examples, and equally many.
            same = self._trainer._same(drawn[0], generator)
            yield [*np.concatenate(batch)[mine].tolist(), *same[mine].tolist()]
