"""`python -m kvedit` and the `kvedit` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # print '?' for what the terminal's encoding lacks
                stream.reconfigure(errors="replace")
        from kvedit.cli.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
