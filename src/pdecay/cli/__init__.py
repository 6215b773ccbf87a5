"""The command line. A command is a module here with a :class:`Command` named ``COMMAND``.

A module declares its arguments; what it runs is imported when it runs, so that ``--help`` never
waits for matplotlib, and a missing extra is an error of the commands that need it only.

Exit codes: 0 for success, 1 where the doctor finds an error or a sweep gave up a run, 2 for bad
input or a missing extra, 130 where it was interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import pdecay
from pdecay.cli import (
    bench,
    compact,
    demo,
    doctor,
    export,
    inspect,
    report,
    sweep,
    train,
)
from pdecay.cli.common import Command, UsageError

COMMANDS = (
    demo.COMMAND,
    train.COMMAND,
    sweep.COMMAND,
    report.COMMAND,
    bench.COMMAND,
    doctor.COMMAND,
    inspect.COMMAND,
    compact.COMMAND,
    export.COMMAND,
)

# The packages that come with an extra of ours, by the name under which they are imported.
_EXTRA_OF = {"matplotlib": "lab", "optuna": "lab", "rich": "lab", "sklearn": "lab"}
_EXTRA_OF |= dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "onnx")
_DISTRIBUTION_OF = {"sklearn": "scikit-learn"}


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
