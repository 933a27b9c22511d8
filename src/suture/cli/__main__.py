"""`python -m suture.cli` is the `suture` command."""

from suture.cli import main

main()
