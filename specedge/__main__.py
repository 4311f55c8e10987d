"""`python -m specedge` is the `specedge` command."""

from specedge.cli import main

if __name__ == "__main__":
    main()
