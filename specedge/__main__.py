"""Entry point of the `specedge` command and of `python -m specedge`."""

from specedge import interrupts


def main() -> None:
    """Run the command line; Ctrl-C is handled before anything is imported that takes a while."""
    interrupts.exit_on_interrupt()
    from specedge.cli import main as run

    run()


if __name__ == "__main__":
    main()
