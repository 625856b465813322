"""`python -m mtpconv` is the same as `mtpconv`."""

from mtpconv.cli import main

main()
