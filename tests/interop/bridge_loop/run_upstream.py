"""Run tests of upstream in this process, one after the other: run_upstream.py TEST..."""

import os
import socket
import sys

os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

import pytest

if "RANK" not in os.environ:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
sys.path.insert(0, os.getcwd())
options = ["-v", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore", f"--basetemp=rank{os.environ.get('RANK', 0)}"]
sys.exit(pytest.main([*options, *sys.argv[1:]]))
