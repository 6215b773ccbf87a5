"""The command line: ``pdecay demo``, ``pdecay bench``, ``pdecay doctor``.

A command is a :class:`Command` in ``COMMANDS``. Its arguments are declared here; what it runs is
imported when it runs, so that ``--help`` never waits for matplotlib, and a missing extra is an
error of the commands that need it only.

Exit codes: 0 for success, 1 where the doctor finds an error, 2 for bad input or a missing extra.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pdecay

# The packages that come with an extra of ours, by the name under which they are imported.
_EXTRA_OF = {"matplotlib": "lab", "rich": "lab", "sklearn": "lab"}
_DISTRIBUTION_OF = {"sklearn": "scikit-learn"}


class UsageError(Exception):
    """Something that the user can put right, told in one line."""


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Args:
        name, summary, example: for the help.
        arguments: declares the arguments on the command's parser.
        run: does the work, from the parsed arguments; returns the exit code.
    """

    name: str
    summary: str
    example: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    command: Command = args.command
    try:
        return command.run(args)
    except UsageError as error:
        return _fail(command, str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA_OF:
            raise
        return _fail(
            command,
            f"{_DISTRIBUTION_OF.get(package, package)} is not installed: "
            f"pip install 'pdecay[{_EXTRA_OF[package]}]'",
        )
    except BrokenPipeError:  # the reader, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(command, str(error))
    except KeyboardInterrupt:
        return _fail(command, "interrupted", code=130)


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("pdecay-demo"),
        metavar="DIR",
        help="where the figures and numbers go (default: ./pdecay-demo)",
    )
    parser.add_argument(
        "--seed",
        type=_natural_number,
        default=0,
        metavar="N",
        help="the first seed; equal seeds give equal results (default: 0)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few short runs, to see that everything works"
    )


def _demo(args: argparse.Namespace) -> int:
    from pdecay.lab import demo

    _check_writable(args.out)
    demo.run(args.out, seed=args.seed, quick=args.quick)
    return 0


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "parts",
        nargs="*",
        choices=[*_BENCH_PARTS, []],
        default=[],
        metavar="PART",
        help=f"any of {', '.join(_BENCH_PARTS)} (default: all)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("pdecay-bench"),
        metavar="DIR",
        help="where the numbers and the plot go (default: ./pdecay-bench)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small and few rounds, to see that everything works"
    )


def _bench(args: argparse.Namespace) -> int:
    from pdecay.lab import bench_report

    _check_writable(args.out)
    bench_report.run(args.out, args.parts or _BENCH_PARTS, quick=args.quick)
    return 0


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "build",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns (model, optimizer)",
    )


def _doctor(args: argparse.Namespace) -> int:
    built = _call(args.build)
    if not (isinstance(built, tuple | list) and len(built) == 2):
        raise UsageError(f"{args.build} must return (model, optimizer), got {_kind(built)}")
    try:
        findings = pdecay.doctor(*built)
    except TypeError as error:
        raise UsageError(f"{args.build} must return (model, optimizer): {error}") from None
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    if not findings:
        sys.stdout.write("nothing found: the model and its optimizer look right\n")
    return int(any(finding.level == "error" for finding in findings))


_BENCH_PARTS = ("step", "growth", "train", "start")

COMMANDS = (
    Command(
        "demo",
        "train AdamW and PAdam on handwritten digits; draw accuracy against sparsity",
        "pdecay demo --out pdecay-demo",
        _demo_arguments,
        _demo,
    ),
    Command(
        "bench",
        "measure what a step costs against torch's own optimizers, in time and memory",
        "pdecay bench step --out pdecay-bench",
        _bench_arguments,
        _bench,
    ),
    Command(
        "doctor",
        "say what would go wrong when a model is trained with an optimizer, and the cure",
        "pdecay doctor my_project.training:build",
        _doctor_arguments,
        _doctor,
    ),
)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pdecay",
        description="Sparse neural networks by p-norm weight decay.",
        epilog="Each command has its own help: pdecay demo --help",
    )
    parser.add_argument("--version", action="version", version=f"pdecay {pdecay.__version__}")
    parser.set_defaults(command=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog=f"example:\n  {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subparser.set_defaults(command=command)
        command.arguments(subparser)
    return parser


def _fail(command: Command, message: str, code: int = 2) -> int:
    sys.stderr.write(f"pdecay {command.name}: error: {message}\n")
    return code


def _natural_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, got {text!r}")
    return int(text)


def _check_writable(directory: Path) -> None:
    """Before the work, not after it: that the results can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(f"cannot write to {str(directory)!r}: {error.strerror}") from None


def _call(target: str) -> Any:
    """Import ``module:function`` and call it; the user's own errors are told in one line."""
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise UsageError(f"expected MODULE:FUNCTION, such as my_project.training:build: {target!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; an installed script does not
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(f"cannot import {module_name!r}: {_told(error)}") from None
    for name in function_name.split("."):
        if not hasattr(found, name):
            raise UsageError(f"{module_name!r} has no {function_name!r}")
        found = getattr(found, name)
    if not callable(found):
        raise UsageError(f"{target} must be a function, got {_kind(found)}")
    try:
        return found()
    except Exception as error:
        raise UsageError(f"{target} failed: {_told(error)}") from None


def _told(error: Exception) -> str:
    """An error of someone else's code in one line, with the place that raised it."""
    message = " ".join(str(error).split())
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if frame.filename.startswith("<") else f" ({frame.filename}:{frame.lineno})"
    return f"{type(error).__name__}: {message}{place}"


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
