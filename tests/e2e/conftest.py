"""End-to-end tests: their helpers' assertions explain themselves, and a failing test shows the last screen."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.e2e.scene", "tests.e2e.outside", "tests.e2e.terminal")
