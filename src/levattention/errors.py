"""Errors that are not plain `ValueError`s."""

from __future__ import annotations


class ConvergenceError(RuntimeError):
    """An iteration did not reach its tolerance; the message says how far it came."""
