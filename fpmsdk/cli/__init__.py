"""The `fpmsdk` command: one module per subcommand, results on stdout, progress and errors on stderr.

Exit codes: 0, 1 (ran, and the result is negative), 2 (the input was rejected), 130 (interrupted, partial result).
"""


def main() -> None:
    """Run the command line of this process."""
    import gc

    # Nearly all objects of a start stay, those of libraries foremost; looking through them again and again takes as
    # long as a tenth of a short command.
    gc.set_threshold(50_000, 20, 100)
    from fpmsdk.cli.app import app

    app()
