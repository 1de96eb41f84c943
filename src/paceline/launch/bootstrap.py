"""Put paceline's class in the place of torch's, then run a script as python would.

    python -P -m paceline.launch.bootstrap script.py args...
    python -P -m paceline.launch.bootstrap -m module args...

This is what a rank of `paceline run --drop-in` starts with.
"""

import atexit
import os
import runpy
import sys
import types
from typing import Any

import torch.multiprocessing
import torch.nn.parallel
import torch.nn.parallel.distributed

from paceline.quiet import wait_for_workers

# What of torch wraps models by the class, or asks for it. Dynamo asks for what only torch's own is.
TAKERS = ("torch.nn.parallel", "torch.distributed.")
EXIT_SECONDS = 10.0  # for the last collective of a script to be put away


def drop_in() -> None:
    """Make torch's name mean paceline's class, from now on and where torch itself has looked it up."""
    from paceline.ddp import DistributedDataParallel

    torchs = torch.nn.parallel.DistributedDataParallel
    for name, module in list(sys.modules.items()):
        if name.startswith(TAKERS):
            for word in [word for word, meaning in vars(module).items() if meaning is torchs]:
                setattr(module, word, DistributedDataParallel)


def tell_of_processes() -> None:
    """Have a line printed where the script starts processes: if they are its ranks, this is not the way."""
    module = sys.modules["torch.multiprocessing.spawn"]
    start = module.start_processes

    def start_and_tell(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK", "0") != "0":
            return start(*args, **kwargs)
        print(
            "paceline: this script starts processes of its own (torch.multiprocessing). If they are its "
            "ranks, start it with plain python, and have it import paceline.DistributedDataParallel: in "
            "these processes the name is torch's.",
            file=sys.stderr,
        )
        return start(*args, **kwargs)

    module.start_processes = torch.multiprocessing.start_processes = start_and_tell  # type: ignore[attr-defined]


def run_script(script: str, args: list[str]) -> None:
    """Run a file as ``python script args`` does, in the real ``__main__``."""
    sys.argv = [script, *args]
    _put_first_on_path(os.path.dirname(os.path.realpath(script)))
    if os.path.isdir(script):
        runpy.run_path(script, run_name="__main__")
        return
    path = os.path.abspath(script)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def run_module(name: str, args: list[str]) -> None:
    """Run a module as ``python -m name args`` does."""
    sys.argv = [name, *args]
    _put_first_on_path(os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _put_first_on_path(folder: str) -> None:
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, folder)


def _show_without_our_frames(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Print an uncaught exception as if the script had been started by python itself."""
    ours = (__file__, "<frozen runpy>", runpy.__file__)
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename in ours:
        first = first.tb_next
    sys.__excepthook__(kind, error.with_traceback(first), first)


def main() -> None:
    """Do what the command line of this module says."""
    sys.excepthook = _show_without_our_frames
    atexit.register(wait_for_workers, EXIT_SECONDS)
    drop_in()
    tell_of_processes()
    if sys.argv[1] == "-m":
        run_module(sys.argv[2], sys.argv[3:])
    else:
        run_script(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
