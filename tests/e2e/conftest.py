"""End-to-end tests: assertions of the scene explain themselves as those of a test do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.e2e.scene", "tests.e2e.outside", "tests.e2e.terminal")
