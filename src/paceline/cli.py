"""The command line: ``paceline run -n 2 train.py`` and what belongs to it."""

import argparse
import os
import sys
from collections.abc import Sequence

from paceline import __version__, environment
from paceline.launch.job import Job
from paceline.launch.run import run

RUN_EXAMPLES = """\
examples:
  paceline run -n 2 train.py --steps 100      two ranks of train.py
  paceline run -n gpu train.py                one rank per GPU
  paceline run -n 2 --drop-in train.py        torch's DistributedDataParallel is paceline's
  paceline run -n 4 -m package.module         a module, as with python -m

The ranks meet on loopback; nothing has to be set or chosen. Each line of output starts with its rank.
If a rank fails, the others are stopped, and the exit code is that of the rank that failed first.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit code."""
    options = _parser().parse_args(argv)
    return int(options.do(options))


def _run(options: argparse.Namespace) -> int:
    job = _job(options)
    try:
        return run(job)
    except OSError as error:
        print(f"paceline run: could not start the ranks: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Data-parallel training for PyTorch that cannot silently go wrong.",
        epilog="example: paceline run -n 2 train.py",
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    _add_run(commands)
    _add_env(commands)
    return parser


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "run",
        help="run a script on several ranks of this machine",
        description="Run a script on several ranks of this machine.",
        epilog=RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="paceline run -n N [--drop-in] [--no-prefix] [-m] script [argument ...]",
    )
    parser.set_defaults(parser=parser, do=_run)
    parser.add_argument(
        "-n", dest="size", metavar="N", required=True, help="how many ranks, or 'gpu' for one per GPU"
    )
    parser.add_argument(
        "--drop-in",
        action="store_true",
        help="let torch.nn.parallel.DistributedDataParallel be paceline's, in every rank",
    )
    parser.add_argument("--no-prefix", dest="prefix", action="store_false", help="no rank before each line")
    parser.add_argument(
        "-m", dest="module", action="store_true", help="script is a module, as with python -m"
    )
    parser.add_argument("script", nargs="?", help="the script that every rank runs")
    parser.add_argument("args", metavar="argument", nargs=argparse.REMAINDER, help="what the script gets")


def _add_env(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "env",
        help="print what a bug report needs",
        description="Print versions, machine, GPUs and the variables that concern data-parallel runs. "
        "Variables that are not on paceline's own list are never printed.",
    )
    parser.set_defaults(do=_env)
    parser.add_argument("--json", action="store_true", help="for programs")


def _env(options: argparse.Namespace) -> int:
    found = environment.collect(__version__)
    print(environment.as_json(found) if options.json else environment.as_text(found))
    return 0


def _job(options: argparse.Namespace) -> Job:
    """Check the options, and end with one clear message if they make no sense."""
    fail = options.parser.error
    if options.script is None:
        fail("which script? As in: paceline run -n 2 train.py")
    if not options.module and not os.path.exists(options.script):
        fail(f"there is no script {options.script!r} in {os.getcwd()}")
    if (
        not options.module
        and os.path.isdir(options.script)
        and "__main__.py" not in os.listdir(options.script)
    ):
        fail(f"{options.script!r} is a folder without a __main__.py")
    size = _count_gpus() if options.size == "gpu" else _whole_number(options.size)
    if options.size == "gpu" and size == 0:
        fail("-n gpu: torch sees no GPU here; give a number of ranks, as in -n 2")
    if size < 1:
        fail(f"-n needs a number of ranks of 1 or more, or 'gpu'; got {options.size!r}")
    target = ("-m", options.script) if options.module else (options.script,)
    return Job((*target, *options.args), size, options.drop_in, options.prefix)


def _whole_number(text: str) -> int:
    """Return the number that a text is, 0 for any other text."""
    return int(text) if text.isascii() and text.isdigit() else 0


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
