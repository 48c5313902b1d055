"""The command line. Nothing heavy is imported before a command runs, so that `kvest --help` answers at once."""

from __future__ import annotations

import sys


def main() -> None:
    """Run a command; anything wrong in the input is one clear message and exit code 2."""
    from kvest.cli.app import app

    try:
        app(standalone_mode=True)
    except (ValueError, OSError) as error:
        print(f"kvest: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
