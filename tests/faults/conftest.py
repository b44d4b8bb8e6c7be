"""Fixtures of the fault tests."""

from __future__ import annotations

import signal

import pytest

from nexus_ablate.training.signals import SIGNALS


@pytest.fixture
def signals_as_in_a_terminal():
    """Undo what a parent may have ignored, as `nohup` does."""
    before = {name: signal.getsignal(getattr(signal, name)) for name in SIGNALS}
    for name, handler in before.items():
        if handler is signal.SIG_IGN:
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    yield
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)
