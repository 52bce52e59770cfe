"""`python -m kvtide` is the same as `kvtide`."""

from kvtide.cli import main

main()
