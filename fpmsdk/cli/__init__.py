"""The `fpmsdk` command: one module per subcommand, results on stdout, progress and errors on stderr.

Exit codes: 0, 1 (ran, and the result is negative), 2 (the input was rejected), 130 (interrupted, partial result).
"""


def main() -> None:
    """Run the command line of this process."""
    from fpmsdk.cli.app import app

    app()
