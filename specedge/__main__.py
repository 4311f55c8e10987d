"""Entry point of the `specedge` command and of `python -m specedge`."""

from specedge import interrupts


def main() -> None:
    """Handle Ctrl-C before the slow imports, then run the command line."""
    interrupts.exit_on_interrupt()
    from specedge.cli import main as run

    run()


if __name__ == "__main__":
    main()
