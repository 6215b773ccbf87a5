"""The ``pdecay`` command and ``python -m pdecay``."""

import os
import sys


def main() -> int:
    """Run the command line; end with one line and exit code 130 after Ctrl-C at any time."""
    try:
        from pdecay.cli import main

        code = main()
    except KeyboardInterrupt:  # during the imports above
        sys.stderr.write("pdecay: error: interrupted\n")
        code = 130
    if code == 130:
        # A normal exit could end in SIGINT instead: Python remembers an interrupt of an import
        # that C code started, even if it was caught.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
