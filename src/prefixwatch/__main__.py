"""`python -m prefixwatch` is the `prefixwatch` command."""

from prefixwatch.stack.cli.main import main

if __name__ == "__main__":
    main()
