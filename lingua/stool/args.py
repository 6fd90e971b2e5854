"""What a launch is told: resources, launcher, restarts, evaluation jobs."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field, fields

from lingua.args import parse, read_yaml
from lingua.errors import UserError, check_fields

LAUNCHERS = ("slurm", "local", "debug")
# Minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS, as sbatch takes it.
TIME_LIMIT = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")


@dataclass
class ResourceArgs:
    """What a job asks of the cluster. An empty value is left out, so that the cluster's default holds."""

    nodes: int = 1
    ngpu: int = 1  # GPUs on each node; 0: none
    tasks_per_node: int | None = None  # ranks on each node; none: one for each GPU, or one if there are none
    cpus: int | None = None  # CPU cores for each rank
    mem: str = ""  # memory of each node, such as 200G
    time: str = ""  # limit: minutes, HH:MM:SS or D-HH:MM:SS
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""  # node features
    exclude: str = ""  # nodes not to run on
    nodelist: str = ""  # nodes to run on
    gres: str = ""  # instead of --gpus-per-node, where GPUs are asked for by kind: gpu:a100:8
    sbatch: dict[str, str] = field(default_factory=dict)  # any other option: sbatch.mail-type=END sbatch.exclusive=true
    srun: list[str] = field(default_factory=list)  # more options for srun, such as --mpi=pmix
    setup: list[str] = field(default_factory=list)  # shell lines before Python starts: module load ..., export ...

    def __post_init__(self) -> None:
        optional = {name: getattr(self, name) for name in ("tasks_per_node", "cpus")}
        checks = {
            "nodes": (self.nodes >= 1, "at least 1"),
            "ngpu": (self.ngpu >= 0, "0 or more"),
            "time": (not self.time or TIME_LIMIT.fullmatch(self.time), "minutes, HH:MM:SS or D-HH:MM:SS"),
            **{name: (value is None or value >= 1, "at least 1") for name, value in optional.items()},
        }
        check_fields(type(self).__name__, self, checks)

        if self.ngpu and self.ranks_per_node > self.ngpu:
            raise UserError(f"tasks_per_node={self.tasks_per_node}: each rank needs a GPU of its own, ngpu={self.ngpu}")

    @property
    def ranks_per_node(self) -> int:
        """Training processes on each node."""
        return self.tasks_per_node or max(1, self.ngpu)

    def sbatch_options(self) -> dict[str, str | bool]:
        """sbatch options by their long name, without the values that are left to the cluster; True has no value."""
        names = ("mem", "time", "partition", "account", "qos", "constraint", "exclude", "nodelist", "gres")
        options: dict[str, str | bool] = {name: getattr(self, name) for name in names if getattr(self, name)}
        if self.ngpu and not self.gres:
            options["gpus-per-node"] = str(self.ngpu)
        if self.cpus:
            options["cpus-per-task"] = str(self.cpus)
        others = {key.replace("_", "-"): value for key, value in self.sbatch.items()}
        return options | {key: True if value.lower() == "true" else value for key, value in others.items()}


@dataclass
class EvaluationArgs(ResourceArgs):
    """A job of its own for each checkpoint that is kept. What is empty here is as for the training job."""

    script: str = ""  # module, such as apps.crossbert.eval; empty: no evaluation jobs
    config: str = ""  # its YAML file; ckpt and out are set for each checkpoint
    words: list[str] = field(default_factory=list)  # more key=value for it
    # Of each evaluation job: singleton runs those of one run one after another, afterany:JOB with the training job's
    # number as {job} holds them until training has ended.
    dependency: str = "singleton"


@dataclass
class StoolArgs(ResourceArgs):
    """Launch a script with the config it is given. The script's own keys follow after --."""

    script: str = "???"  # module to run, such as apps.crossbert.train
    config: str = ""  # the script's YAML file
    dump_dir: str = ""  # run folder, or the folder of a sweep's runs; empty: the dump_dir of the script's config
    name: str = ""  # of the job; empty: that of the run folder
    launcher: str = "slurm"  # slurm; local: in the background on this machine; debug: in this process, under pdb
    dry_run: bool = False  # print the batch script and the plan, submit nothing
    python: str = ""  # Python that runs the job, such as one in a container; empty: this one
    dependency: str = ""  # as sbatch takes it, such as afterok:1234
    signal_s: int = 120  # seconds before the time limit at which the run is told to save and stop
    max_restarts: int = 50  # times a job may start again after preemption, its time limit or a crash
    requeue_on_crash: bool = False  # also start again after a crash; a user error never does
    straggler_s: int = 300  # seconds the other ranks have to end once one has ended
    max_parallel: int = 8  # runs of a sweep at the same time
    gpu_gb: float | None = None  # memory of one GPU: a config that needs more is refused
    snapshot_mb: float = 100.0  # a snapshot of the code larger than this is refused
    eval: EvaluationArgs = field(default_factory=EvaluationArgs)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = {
            "launcher": (self.launcher in LAUNCHERS, ", ".join(LAUNCHERS)),
            "signal_s": (self.signal_s >= 1, "at least 1"),
            "max_restarts": (self.max_restarts >= 0, "0 or more"),
            "straggler_s": (self.straggler_s >= 1, "at least 1"),
            "max_parallel": (self.max_parallel >= 1, "at least 1"),
            "gpu_gb": (self.gpu_gb is None or self.gpu_gb > 0, "more than 0"),
        }
        check_fields("stool", self, checks)
        if self.launcher == "slurm" and not self.time:
            raise UserError("no value for time: a job needs a limit, such as time=24:00:00; it goes on after it")
        if self.launcher == "slurm" and _seconds(self.time) <= self.signal_s:
            raise UserError(
                f"signal_s={self.signal_s} is no less than time={self.time}: the run would be told to stop at once"
            )
        if self.launcher != "slurm" and self.nodes > 1:
            raise UserError(f"launcher={self.launcher} runs on this machine: nodes={self.nodes} needs launcher=slurm")
        if self.eval.script and self.launcher == "slurm" and not self.eval.time:
            raise UserError("no value for eval.time: evaluation jobs need a limit, such as eval.time=30")

    def evaluation_resources(self) -> ResourceArgs:
        """Resources of an evaluation job: its own, and the training job's where those say nothing."""
        shared = ("partition", "account", "qos", "constraint", "exclude", "setup", "srun")
        own = {name: getattr(self.eval, name) for name in ResourceArgs.__dataclass_fields__}
        return ResourceArgs(**own | {name: own[name] or getattr(self, name) for name in shared})


@dataclass
class Request:
    """One command line: the launch, the swept keys and the script's own words."""

    args: StoolArgs
    sweep: dict[str, list[str]]  # values by key of the script's config
    sweep_file: str | None
    words: list[str]  # key=value for the script

    @property
    def is_sweep(self) -> bool:
        return bool(self.sweep) or self.sweep_file is not None


def read_request(argv: list[str]) -> Request:
    """Read ``script=... [key=value ...] [sweep.KEY=A,B ...] [-- KEY=VALUE ...]``.

    ``config=`` is the script's file; ``cluster=FILE.yaml`` holds values of this command, such as a cluster's account.

    Raises:
        UserError: a word that is not ``key=value``, an unknown key or a value out of range.
    """
    cut = argv.index("--") if "--" in argv else len(argv)
    own, words, config, sweep, cluster = [], argv[cut + 1 :], "", {}, []
    for word in words:
        if "=" not in word:
            raise UserError(f"after --: {word!r} is not of the form key=value")
    for word in argv[:cut]:
        key, equals, value = word.partition("=")
        if key == "config":
            config = value
        elif key == "cluster":
            _check_texts(value)
            cluster.append(f"config={value}")
        elif key.startswith("sweep.") and equals:
            sweep[key.removeprefix("sweep.")] = value
        else:
            own.append(word)
    try:
        args = parse(StoolArgs, cluster + as_text(own))
    except UserError as error:
        if "unknown key" in str(error):
            raise UserError(f"{error}; keys of the script's own config come after --") from None
        raise
    args.config = config or args.config
    file = sweep.pop("file", None)
    return Request(args, {key: split_values(key, value) for key, value in sweep.items()}, file, words)


def as_text(words: list[str]) -> list[str]:
    """Quote the values of fields that are text: YAML would take 24:00:00 for a number of seconds, 012 for ten."""
    quoted = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and _is_text(key) and value[:1] not in ("'", '"'):
            word = f"{key}='" + value.replace("'", "''") + "'"
        quoted.append(word)
    return quoted


def _is_text(key: str) -> bool:
    key = key.removeprefix("eval.")
    texts = {f.name for cls in (StoolArgs, EvaluationArgs) for f in fields(cls) if f.type == "str"}
    return key in texts or key.startswith("sbatch.")


def _check_texts(path: str) -> None:
    values = read_yaml(path)
    for section, prefix in ((values, ""), (values.get("eval") or {}, "eval.")):
        if not isinstance(section, dict):
            raise UserError(f"{path}: {prefix.rstrip('.')}: expected keys with values, found {section!r}")
        texts = {f"{prefix}{key}": value for key, value in section.items()}
        texts |= {f"{prefix}sbatch.{key}": value for key, value in (section.get("sbatch") or {}).items()}
        for key, value in texts.items():
            if _is_text(key) and not isinstance(value, str):
                raise UserError(f"{path}: {key}: {value!r} is read as no text: put it in quotes, as in '24:00:00'")


def script_words(config: str, words: list[str]) -> list[str]:
    """The script's command line."""
    return ([f"config={config}"] if config else []) + words


def split_values(key: str, text: str) -> list[str]:
    """Split at the commas that stand in no bracket: ``1e-3,[a,b]`` is two values."""
    values, depth = [""], 0
    for char in text:
        depth += (char in "[{(") - (char in "]})")
        if char == "," and depth == 0:
            values.append("")
        else:
            values[-1] += char
    values = [value.strip() for value in values]
    if "" in values or depth:
        raise UserError(f"sweep.{key}={text}: expected values with commas between them")
    return values


def _seconds(limit: str) -> int:
    """A time limit as sbatch reads it, in seconds."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # D-HH, D-HH:MM, D-HH:MM:SS
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:  # MM, MM:SS, HH:MM:SS
        hours, minutes, seconds = parts if len(parts) == 3 else [0, *[*parts, 0][:2]]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def quote(words: list[str]) -> str:
    """A command line that a shell reads back as ``words``."""
    return shlex.join(words)
