"""``pdecay completion``."""

from __future__ import annotations

import argparse
import sys

SUMMARY = 'print completions for bash or zsh; use: eval "$(pdecay completion bash)"'
EXAMPLE = "pdecay completion bash"

_SCRIPT = """\
_pdecay() {{
  local words
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="{commands}" ;;
  esac
  [ "$COMP_CWORD" -eq 1 ] && words="{commands}"
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _pdecay pdecay
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh"], help="the shell")


def run(args: argparse.Namespace) -> int:
    from pdecay.cli import COMMANDS, name_of

    options = {name_of(command): _options(command) for command in COMMANDS}
    cases = "\n".join(
        f'    {name}) words="{" ".join(words)}" ;;' for name, words in options.items()
    )
    if args.shell == "zsh":
        sys.stdout.write("autoload -U +X bashcompinit && bashcompinit\n")
    sys.stdout.write(_SCRIPT.format(cases=cases, commands=" ".join(options)))
    return 0


def _options(command: object) -> list[str]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)  # type: ignore[attr-defined]
    return [name for action in parser._actions for name in action.option_strings if "--" in name]
