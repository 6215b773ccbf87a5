"""The command line: one module for each command.

Each has the texts ``SUMMARY`` and ``EXAMPLE`` of ``--help``, ``add_arguments(parser)``, and
``run(args)``, which returns the exit code.

The modules import torch and the lab only when a command runs. So ``--help`` is fast, and a missing
extra is an error only of the commands that need it.

Exit codes: 0 for success, 1 if the doctor found an error or a sweep gave up a run, 2 for invalid
input or a missing extra, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

import pdecay
from pdecay._utils.errors import UserError, one_line
from pdecay.cli import (
    bench,
    compact,
    completion,
    demo,
    deploy,
    doctor,
    export,
    inspect,
    report,
    sweep,
    train,
)

COMMANDS: tuple[ModuleType, ...] = (
    *(demo, train, sweep, report, bench, doctor),
    *(inspect, compact, deploy, export, completion),
)

# The extra that installs a package, by the package's import name.
_EXTRA_OF = {"matplotlib": "lab", "optuna": "lab", "pooch": "lab", "rich": "lab", "sklearn": "lab"}
_EXTRA_OF |= dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "onnx") | {"torch": "torch"}
_DISTRIBUTION_OF = {"sklearn": "scikit-learn"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names may have bytes that are not valid in the encoding of the terminal.
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    command: ModuleType = args.command
    try:
        return int(command.run(args))
    except UserError as error:
        return _fail(command, one_line(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA_OF:
            raise
        return _fail(
            command,
            f"{_DISTRIBUTION_OF.get(package, package)} is not installed: "
            f"pip install 'pdecay[{_EXTRA_OF[package]}]'",
        )
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(command, one_line(error))
    except KeyboardInterrupt:
        return _fail(command, "interrupted", code=130)


class _Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pdecay",
        description="Train and deploy sparse neural networks with p-norm weight decay.",
        epilog="Each command has its own help: pdecay demo --help",
    )
    parser.add_argument("--version", action="version", version=f"pdecay {pdecay.__version__}")
    parser.set_defaults(command=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            name_of(command),
            help=command.SUMMARY,
            description=f"{command.SUMMARY[0].upper()}{command.SUMMARY[1:]}.",
            epilog=f"example:\n  {command.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subparser.set_defaults(command=command)
        command.add_arguments(subparser)
    return parser


def name_of(command: ModuleType) -> str:
    """Return the name of a command on the command line."""
    return command.__name__.rpartition(".")[2]


def _fail(command: ModuleType, message: str, code: int = 2) -> int:
    sys.stderr.write(f"pdecay {name_of(command)}: error: {message}\n")
    return code
