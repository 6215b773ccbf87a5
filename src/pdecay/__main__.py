"""``python -m pdecay``: the command line."""

from pdecay.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
