"""A page in a headless chromium."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

NEEDS_CHROMIUM = pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")


def title_after(script, page, folder, *flags):
    """The title of a page whose last script has run, and which that script sets."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", *flags, "--dump-dom", f"file://{path}"]
    home = os.environ | {"HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=home, check=True)
    match = re.search(r"<title>(.*?)</title>", done.stdout)
    assert match is not None, done.stdout[:500]
    return match[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
