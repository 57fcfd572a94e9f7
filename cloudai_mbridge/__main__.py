"""`python -m cloudai_mbridge` is `mbridge`."""

from cloudai_mbridge.cli import main

main()
