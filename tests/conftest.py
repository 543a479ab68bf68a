"""What every test shares: one profile for generated tests, and no word from the developer's own environment."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Their assertions explain themselves as those of a test do. Said here, before any test can import them.
pytest.register_assert_rewrite("tests.e2e.scene", "tests.e2e.outside", "tests.e2e.terminal")

# Two shared cores make single examples slow now and then: a deadline would only test the machine.
settings.register_profile(
    "peri", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("peri-long", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("PERI_TEST_PROFILE", "peri"))


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's keys, servers and folders out of every test."""
    for name in list(os.environ):
        if name.startswith("PERI_") and name != "PERI_TEST_PROFILE":
            monkeypatch.delenv(name)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ESCDELAY", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
