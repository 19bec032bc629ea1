"""``python -m liger_like`` is the ``liger-like`` command."""

from liger_like.cli import main

main()
