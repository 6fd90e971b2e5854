"""``python -m lingua.stool``: launch runs, and look after them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lingua.args import help_text, reader_has_gone
from lingua.errors import UserError
from lingua.stool.args import StoolArgs, read_request

USAGE = """python -m lingua.stool script=apps.crossbert.train config=FILE.yaml dump_dir=runs/NAME
                              nodes=2 ngpu=8 time=24:00:00 [cluster=FILE.yaml] [key=value ...]
                              [sweep.KEY=A,B ...] [sweep.file=POINTS.yaml]
                              [-- KEY=VALUE ... of the script's own config]
       python -m lingua.stool status RUN...   how runs and sweeps fare
       python -m lingua.stool logs RUN        what a run printed; -f follows it
       python -m lingua.stool cancel RUN...   end runs; what they did is saved
       python -m lingua.stool resume RUN      submit again what has not finished
       python -m lingua.stool evaluate RUN    launch the evaluations that failed or were never submitted
  launch:"""
COMMANDS = ("status", "logs", "cancel", "resume", "evaluate")


def main(argv: list[str]) -> None:
    """The command line without the program's name."""
    if argv and argv[0] in COMMANDS:
        _command(argv)
    elif not argv or any(word in ("-h", "--help", "help") for word in argv):
        print(help_text(StoolArgs, USAGE))
    else:
        from lingua.stool.launch import launch

        launch(read_request(argv))


def _command(argv: list[str]) -> None:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog=f"python -m lingua.stool {argv[0]}")
    if argv[0] in ("status", "cancel"):
        parser.add_argument("runs", nargs="+", type=Path, help="folders of runs or sweeps")
    else:
        parser.add_argument("run", type=Path, help="folder of a run or, but for logs, a sweep")
    if argv[0] == "status":
        parser.add_argument("--json", action="store_true", help="one JSON object a run")
    elif argv[0] == "logs":
        parser.add_argument("-f", "--follow", action="store_true", help="until the run has ended")
        parser.add_argument("--rank", type=int, help="what this rank printed, instead of the training log")
    elif argv[0] == "resume":
        parser.add_argument("changes", nargs="*", help="key=value of the launch; those of the script follow after --")
        parser.add_argument("--new-code", action="store_true", help="with the code of today, not that of the launch")
    args = parser.parse_args(argv[1:cut])
    from lingua.stool import status

    if argv[0] == "status":
        status.status(args.runs, args.json)
    elif argv[0] == "logs":
        status.logs(args.run, args.rank, args.follow)
    elif argv[0] == "cancel":
        status.cancel(args.runs)
    elif argv[0] == "resume":
        from lingua.stool.launch import resume

        resume(args.run, args.changes, argv[cut + 1 :], args.new_code)
    else:
        from lingua.stool.evaluation import evaluate_again
        from lingua.stool.sweep import expand

        for run in expand([args.run]):
            evaluate_again(run)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError as error:
        raise SystemExit(reader_has_gone(error)) from None
    except OSError as error:  # a folder that cannot be written, a full disk
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
