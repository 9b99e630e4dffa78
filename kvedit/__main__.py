"""`python -m kvedit` and the `kvedit` command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # what a terminal cannot show becomes a question mark
                stream.reconfigure(errors="replace")
        from kvedit.cli.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader has gone (`kvedit show | head`): end quietly, and keep Python from complaining
        # when it flushes what nobody reads.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
