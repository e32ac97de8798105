"""A cron of the test's own: its spool, its tables and its process id file are private to a mount namespace."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

PREPARE = (
    "set -e; mount -t tmpfs -o mode=1730 spool /var/spool/cron/crontabs; chgrp crontab /var/spool/cron/crontabs; "
    "mount -t tmpfs run /run; mount -t tmpfs tables /etc/cron.d; mount --bind /dev/null /etc/crontab; "
)


@pytest.fixture
def private_cron() -> list[str]:
    """The start of a command line whose last argument is a shell script that sees no crontab but its own."""
    for program in ("cron", "crontab", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"needs the program {program}")
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", PREPARE + 'eval "$0"']
    tried = subprocess.run([*command, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"needs the right to mount (root): {tried.stderr.strip() or os.geteuid()}")
    return command
