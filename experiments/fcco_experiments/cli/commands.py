"""The commands that train: `run`, `compare`, `sweep`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from .. import distributed
from . import options as o
from .errors import fail, guarded
from .training import carry_out, finish, tell_sweep

__all__ = ["compare", "run", "sweep"]


@guarded
def run(
    context: typer.Context,
    task: o.TaskName,
    data: o.Data = None,
    method: Annotated[str | None, typer.Option(help="A method of the config; the first.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and batches.")] = 0,
    setting: o.SettingName = None,
    config: o.ConfigName = None,
    quick: o.Quick = False,
    out: o.Out = None,
    resume: o.Resume = False,
    overwrite: o.Overwrite = False,
    as_json: o.AsJson = False,
    tensorboard: o.TensorBoard = False,
    data_folder: o.DataFolder = None,
    quiet: o.Quiet = False,
) -> None:
    """Train one method once. Any key of the config is an option, such as --epochs 10 --lr 0.1."""
    from .. import compare as comparisons

    o.needs(tensorboard)
    o.use_data(data_folder)
    if any(key == "seeds" for key, _ in o.extras(context)):
        raise fail("`run` trains once: give --seed NUMBER. Several seeds: fcco compare.")
    if method is not None and "," in method:
        raise fail("`run` trains one method: give --method NAME. Several: fcco compare --methods.")
    bare = o.resolve(context, task, data, setting, config, quick, pairs=())
    name = next(iter(bare.config.methods), None) if method is None else method
    if name is None:
        raise fail("The config has no methods.")
    o.pick(bare.config.methods, name)
    asked = o.resolve(context, task, data, setting, config, quick, method=name)
    chosen = {name: asked.config.methods[name]}
    one = dataclasses.replace(asked.config, methods=chosen, seeds=(seed,))
    plan = comparisons.plan(task, asked.config_name, one, quick=quick)
    folder = asked.folder(out, name, f"seed-{seed}")
    good = carry_out(
        plan, folder, resume=resume, overwrite=overwrite, workers=1, tensorboard=tensorboard,
        quiet=quiet,
    )  # fmt: skip
    finish(folder, as_json=as_json, quiet=quiet)
    raise typer.Exit(0 if good else 1)


@guarded
def compare(
    context: typer.Context,
    task: o.TaskName,
    data: o.Data = None,
    methods: o.Methods = None,
    seeds: o.Seeds = None,
    workers: o.Workers = None,
    setting: o.SettingName = None,
    config: o.ConfigName = None,
    quick: o.Quick = False,
    out: o.Out = None,
    resume: o.Resume = False,
    overwrite: o.Overwrite = False,
    as_json: o.AsJson = False,
    tensorboard: o.TensorBoard = False,
    data_folder: o.DataFolder = None,
    quiet: o.Quiet = False,
) -> None:
    """Train several methods with several seeds: one table and one report."""
    from .. import compare as comparisons

    o.needs(tensorboard)
    o.use_data(data_folder)
    asked = o.resolve(context, task, data, setting, config, quick, methods=methods, seeds=seeds)
    plan = comparisons.plan(task, asked.config_name, asked.config, quick=quick)
    if not plan.specs:
        raise fail("There is nothing to run: the config has no methods or no seeds.")
    folder = asked.folder(out)
    good = carry_out(
        plan, folder, resume=resume, overwrite=overwrite, workers=workers,
        tensorboard=tensorboard, quiet=quiet,
    )  # fmt: skip
    finish(folder, as_json=as_json, quiet=quiet)
    raise typer.Exit(0 if good else 1)


@guarded
def sweep(
    context: typer.Context,
    task: o.TaskName,
    data: o.Data = None,
    grid: Annotated[
        str | None,
        typer.Option(
            help="A grid by name (fairness: appendix, wide, frontier, paper, full; group-dro: "
            "appendix, wide, annealed, finetune; continual: paper, wide, finetune), or a YAML "
            "file. Or --grid.METHOD.KEY '[0.1, 0.01]'."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Settings of each method.")] = None,
    methods: o.Methods = None,
    seeds: Annotated[str | None, typer.Option(help="Tuning seeds, as 1000,1001.")] = None,
    workers: o.Workers = None,
    fleet: o.Fleet = None,
    device: o.Device = None,
    chunk: o.Chunk = None,
    setting: o.SettingName = None,
    config: o.ConfigName = None,
    quick: o.Quick = False,
    out: o.Out = None,
    resume: o.Resume = False,
    overwrite: o.Overwrite = False,
    as_json: o.AsJson = False,
    tensorboard: o.TensorBoard = False,
    data_folder: o.DataFolder = None,
    quiet: o.Quiet = False,
) -> None:
    """Try many settings of each method; the best on validation data go to winners.yaml.

    Runs of a task that can do so (fairness) are trained together, thousands at a time on a GPU.
    """
    from .. import config as configs
    from .. import sweep as sweeps
    from .. import tasks

    o.needs(tensorboard)
    o.use_data(data_folder)
    pairs = o.extras(context)
    inline = [(key.removeprefix("grid."), text) for key, text in pairs if key[:5] == "grid."]
    rest = [pair for pair in pairs if pair[0][:5] != "grid."]
    if device is not None and "device" in configs.fields_of(tasks.get(task).config):
        rest, device = [*rest, ("device", device)], None
    asked = o.resolve(context, task, data, setting, config, quick, pairs=rest)
    runner = o.runner(asked.task, fleet, device, chunk, tensorboard)
    if grid is None and not inline:
        grid = asked.task.grid_name(asked.config)
    whole = sweeps.Grid() if grid is None else sweeps.read_grid(asked.task, grid)
    whole = sweeps.with_inline(whole, inline)
    if methods is not None:
        whole = dataclasses.replace(whole, methods=o.pick(whole.methods, methods))
    chosen = sweeps.settings_of(whole, asked.config, limit=limit, source=grid or "command line")
    tuning = whole.seeds if seeds is None else o.numbers("--seeds", seeds)
    plan = sweeps.plan_sweep(task, asked.config_name, asked.config, chosen, tuning, quick=quick)
    folder = asked.folder(out, "sweep")
    good = carry_out(
        plan, folder, resume=resume, overwrite=overwrite, workers=workers,
        tensorboard=tensorboard, quiet=quiet, runner=runner,
    )  # fmt: skip
    if distributed.is_first():
        told = sweeps.choose(folder, chosen, asked.config.seeds)
        tell_sweep(told, folder, as_json=as_json, quiet=quiet)
    raise typer.Exit(0 if good else 1)
