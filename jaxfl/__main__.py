"""`python -m jaxfl`, which is the command `jaxfl`."""

from jaxfl.cli.main import main

if __name__ == "__main__":
    main()
