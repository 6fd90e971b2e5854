"""Frozen evaluation of an encoder: features of the layers asked for, probes on every task, results in files.

The apps' ``eval.py`` are entries to this, each with its own model class.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lingua.args import build, to_dict
from lingua.checkpoint import in_use, read_state, resolve
from lingua.distributed import World, pick_dtype, start
from lingua.errors import UserError
from lingua.evaluation.feature_files import FeatureFiles
from lingua.evaluation.glue import GLUE, GlueArgs, load_glue
from lingua.evaluation.probe import ProbeArgs
from lingua.evaluation.probe_task import glue_average, probe_task
from lingua.evaluation.results import RESULTS, UNTRAINED, writable_folder, write_results
from lingua.evaluation.tasks import Task, TaskArgs, load_task
from lingua.features import load_encoder, run_folder
from lingua.frozen import POOLINGS, FrozenEncoder, usable_device
from lingua.hf_encoder import load_hf_encoder, parameter_counts
from lingua.storage import as_path, is_local

HF = "hf:"
TIMEOUT = 24 * 3600.0  # seconds that a process waits for another, whose probes may take long


@dataclass
class EvalArgs:
    """Probe a frozen encoder layer by layer; writes results.json, results.md and pictures, and prints the table.

    tasks.NAME.KEY=VALUE defines a task of your own: ``python -m lingua.evaluation.tasks --help`` lists its keys.
    Several processes (torchrun, srun) share the work.
    """

    ckpt: str | None = None  # run folder (its newest complete checkpoint) or checkpoint folder
    model: str | None = None  # instead of ckpt, any Hugging Face encoder: hf:ID on the hub, or its folder
    trust_remote_code: bool = False  # run Python files that come with such a model
    tasks: Any = None  # glue, one or a list of its tasks, or your own under names of your own
    glue: GlueArgs = field(default_factory=GlueArgs)
    layers: Any = "all"  # all, a number or a list; 0 is the embedding, negative numbers count from the last
    random_init: bool = False  # the run's weights before its first step instead: the untrained baseline
    watch: bool = False  # evaluate every checkpoint the run has and will have, and draw scores against training
    watch_minutes: float = 120.0  # end after so long without a new checkpoint, or with the run's last
    out: str | None = None  # folder of the results; none: RUN/eval/STEP, RUN/eval/untrained, or eval/MODEL
    features: str | None = None  # folder of the feature files; none: features/ beside the folder of the results
    keep_features: bool = True  # leave them for the next probe; they take 4 bytes x width a row and layer
    pooling: str = "mean"  # of a text's tokens, special ones included: mean | first | last | max
    final_norm: bool = True  # apply the encoder's final norm to every layer but the embedding
    max_length: int | None = None  # most tokens of a sequence; none: the row length of the training data
    batch_tokens: int = 16_384  # most tokens in a forward pass, padding included
    dtype: str = "fp32"  # of the forward pass: fp32 | bf16 (faster, rounds features to three digits) | auto
    device: str | None = None  # none: the GPU if there is one, one for each process
    probe: ProbeArgs = field(default_factory=ProbeArgs)

    def __post_init__(self) -> None:
        if (self.ckpt is None) == (self.model is None):
            raise UserError("give one of ckpt=RUN and model=hf:ID")
        if self.model is not None and (self.random_init or self.watch):
            raise UserError("random_init and watch are for runs: give ckpt=RUN instead of model")
        layers = self.layers if isinstance(self.layers, list) else [self.layers]
        integers = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers)
        if self.layers != "all" and not (layers and integers):
            raise UserError(f"layers={self.layers}: expected all, a number or a list such as [0,4,-1]")
        if self.pooling not in POOLINGS:
            raise UserError(f"pooling={self.pooling}: expected one of {', '.join(POOLINGS)}")
        if self.batch_tokens < 1:
            raise UserError(f"batch_tokens={self.batch_tokens}: expected at least 1")
        if self.dtype not in ("fp32", "bf16", "auto"):
            raise UserError(f"dtype={self.dtype}: expected fp32, bf16 or auto")
        if not self.watch_minutes >= 0:
            raise UserError(f"watch_minutes={self.watch_minutes}: expected 0 or more")
        self.tasks = _named_tasks(self.tasks)


@dataclass
class _OwnTasks:
    tasks: dict[str, TaskArgs] = field(default_factory=dict)


def _named_tasks(tasks: Any) -> list[str] | dict[str, TaskArgs]:
    """Names of GLUE's tasks, or tasks of the user's own."""
    if not tasks:
        raise UserError("no tasks: give tasks=glue, or at least tasks.NAME.train=FILE and tasks.NAME.test=FILE")
    if isinstance(tasks, dict):
        for name in tasks:
            if set(str(name)) & set("|$\n"):
                raise UserError(
                    f"tasks.{name}: its name goes into tables and pictures: use none of | $ and line breaks"
                )
        sections = {name: to_dict(task) if isinstance(task, TaskArgs) else task for name, task in tasks.items()}
        return build(_OwnTasks, ("the config", {"tasks": sections})).tasks
    names = tasks if isinstance(tasks, list) else [tasks]
    names = list(GLUE) if names == ["glue"] else names
    for name in names:
        if name not in GLUE:
            raise UserError(f"tasks={name}: expected glue, some of {', '.join(GLUE)}, or tasks.{name}.train=FILE ...")
    return names


# Makes the model of a run from its model's args and its whole config.
MakeModel = Callable[[Any, dict[str, Any]], nn.Module]


def evaluate(
    args: EvalArgs, model_class: type[nn.Module], model_args: type, make_model: MakeModel | None = None
) -> dict[str, Any]:
    """Probe one encoder on every task, write and print the results, and return them.

    With ``args.watch``, do so for every checkpoint of the run and return the last one's
    (:func:`lingua.evaluation.watch.watch`).

    Args:
        model_class, model_args: the app's model and its config dataclass, for a run's parameter counts.
        make_model: where the class depends on more of the run's config; none: ``model_class`` of the args.

    Raises:
        UserError: a run of another app, and whatever the checkpoint, tasks, features and probes refuse.
    """
    evaluation = Evaluation(args, model_class, model_args, make_model)
    if args.watch:
        from lingua.evaluation.watch import watch

        return watch(evaluation)
    if args.model is not None:
        return evaluation.of_model(args.model)
    world = evaluation.world
    return evaluation.of_checkpoint(world.from_first(resolve(args.ckpt) if world.is_first else None))


class Evaluation:
    """What stays the same from one encoder to the next: the processes, the tasks' data, and where results go."""

    def __init__(
        self, args: EvalArgs, model_class: type[nn.Module], model_args: type, make_model: MakeModel | None = None
    ) -> None:
        self.args, self.model_class, self.model_args = args, model_class, model_args
        self._make_model = make_model or (lambda args, config: model_class(args))
        self.world: World = start(TIMEOUT)
        self.device = usable_device(args.device or str(self.world.device))
        self.dtype = pick_dtype(args.dtype, torch.device(self.device.partition(":")[0]))
        if args.ckpt is not None:
            # A run that is watched need not have a checkpoint yet.
            self.run = as_path(args.ckpt) if args.watch else run_folder(args.ckpt, resolve(args.ckpt))
            if not self.run.is_dir():
                raise UserError(f"{self.run}: no such run folder")
        self.root = Path("eval") if args.ckpt is None else self.run / "eval"
        if not is_local(self.root) and args.out is None:
            raise UserError(f"ckpt={args.ckpt} is not on a disk: give out=FOLDER for the results")
        self._tasks: list[Task] | None = None

    def tasks(self) -> list[Task]:
        """Every task, read once. Raises UserError at the first that cannot be used."""
        if self._tasks is None:
            named = self.args.tasks
            if isinstance(named, dict):
                self._tasks = [load_task(name, task_args) for name, task_args in named.items()]
            else:
                self._tasks = [load_glue(name, self.args.glue) for name in named]
            for task in self._tasks:
                if task.kind == "tokens" and "attentive" in self.args.probe.kinds:
                    raise UserError(f"tasks.{task.name}: the attentive probe pools a text; this task labels words")
                for path, lines in task.left_out.items():
                    print(f"{path}: left out for want of the right number of columns: {len(lines)} lines, {lines[:9]}")
        return self._tasks

    def out(self, name: str) -> Path:
        """Folder of the results of a checkpoint or model."""
        if self.args.out is None:
            return self.root / name
        return Path(self.args.out) / name if self.args.watch else Path(self.args.out)

    def of_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Evaluate one checkpoint of the run."""
        args, out = self.args, writable_folder(self.out(UNTRAINED if self.args.random_init else folder.name))
        self.tasks()  # bad data before long work
        with in_use(folder):
            encoder = load_encoder(folder, args.random_init, args.max_length, self.device, self.dtype, self.run)
            step = read_state(folder)["step"]
        batch_tokens = encoder.config.get("batch_tokens")
        known = {
            "checkpoint": str(folder),
            "step": step,
            "tokens": None if batch_tokens is None else step * batch_tokens,
            "random_init": args.random_init,
            "training_seed": encoder.config["seed"],
            "model": type(model := self._run_model(folder, encoder.config)).__name__,
            "parameters": model.parameter_counts(),
        }
        return self._probe(encoder, known, out)

    def of_model(self, model: str) -> dict[str, Any]:
        """Evaluate an encoder of Hugging Face."""
        name = model.removeprefix(HF)
        out = writable_folder(self.out(Path(name).name))
        if self.args.out is None and (out / RESULTS).is_file():
            of = json.loads((out / RESULTS).read_text())["checkpoint"]
            if of != name:
                raise UserError(f"{out} holds the results of {of}: give out=FOLDER for those of {name}")
        self.tasks()
        args = self.args
        encoder = load_hf_encoder(name, args.max_length, self.device, self.dtype, args.trust_remote_code)
        if encoder.causal and self.world.is_first:
            print(f"{model} is a decoder: the features of a token know those before it only")
        known = {
            "checkpoint": name,
            "commit": getattr(encoder.model.config, "_commit_hash", None),
            "step": None,
            "random_init": False,
            "model": name,
            "causal": encoder.causal,
            "parameters": parameter_counts(encoder.model),
        }
        return self._probe(encoder, known, out)

    def _probe(self, encoder: FrozenEncoder, known: dict[str, Any], out: Path) -> dict[str, Any]:
        """Features, probes and results of one encoder, on every rank alike; rank 0 writes and prints."""
        args, world = self.args, self.world
        layers = _layers(args.layers, encoder)
        files = FeatureFiles(writable_folder(args.features or out.parent / "features"), world)
        how = (args.pooling, args.batch_tokens, args.final_norm)
        results = {
            **known,
            "layers": layers,
            "max_length": encoder.max_length,
            "config": to_dict(args),
            "versions": self._versions(),
            "tasks": {
                task.name: probe_task(task, encoder, files, layers, how, args.probe, world) for task in self.tasks()
            },
        }
        results["glue_average"] = glue_average(results, self.tasks())
        if world.is_first:
            table = write_results(results, out)
            print(f"\n{table}\nwritten to {out}/", flush=True)
            if not args.keep_features:
                files.remove()
        world.gather(None)
        return results

    def _versions(self) -> dict[str, str]:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        if self.args.model is not None:
            import transformers

            versions["transformers"] = transformers.__version__
        return versions

    def _run_model(self, folder: Path, run_config: dict[str, Any]) -> nn.Module:
        config = run_config["model"]
        # A config of older code may lack a field, which then has its default, but no part of the model.
        fields = {f.name: f.default_factory for f in dataclasses.fields(self.model_args)}
        parts = {name for name, factory in fields.items() if dataclasses.is_dataclass(factory)}
        differs = sorted((set(config) - set(fields)) | (parts - set(config)))
        if differs:
            raise UserError(
                f"{folder} is not a run of {self.model_class.__name__}: its model has {', '.join(differs)} against "
                "this app's config; use the eval of the app that trained it"
            )
        with torch.device("meta"):
            return self._make_model(build(self.model_args, (f"{folder}/config.yaml", config)), run_config)


def _layers(asked: Any, encoder: FrozenEncoder) -> list[int]:
    if asked == "all":
        return list(range(encoder.n_layers + 1))
    try:
        return sorted({encoder.layer_number(layer) for layer in (asked if isinstance(asked, list) else [asked])})
    except UserError:
        raise UserError(f"layers={asked}: the encoder has layers 0 (embedding) to {encoder.n_layers}") from None
