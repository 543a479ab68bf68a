"""What importing a part of the package may load, each asked in a fresh interpreter."""

from __future__ import annotations

import importlib.util
import pkgutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

SDKS = ("openai", "anthropic", "mcp", "acp", "pydantic", "litellm")
SCREEN = ("textual", "rich")
EDGES = ("httpx", "httpcore", "websockets", "aiofiles", "sqlite3", "platformdirs")

PROBE = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def loaded_by(module: str) -> set[str]:
    """Return the top-level modules that are loaded after importing ``module`` alone."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not built yet")
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROBE, module], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, f"import {module} fails: {done.stderr.strip()[-2000:]}"
    return set(done.stdout.split())


def names_below(package: str) -> list[str]:
    path = importlib.util.find_spec(package).submodule_search_locations  # type: ignore[union-attr]
    return [f"{package}.{info.name}" for info in pkgutil.iter_modules(path)]


@pytest.mark.parametrize("module", names_below("peri_tui.core"))
def test_core_loads_nothing_of_the_edges(module: str) -> None:
    assert not loaded_by(module) & {*SCREEN, *EDGES, *SDKS, "asyncio", "socket", "subprocess"}


@pytest.mark.parametrize("module", ["peri_tui.cli", "peri_tui.agent.server", *names_below("peri_tui.client")])
def test_command_line_client_and_agent_load_no_screen(module: str) -> None:
    assert not loaded_by(module) & {*SCREEN, *SDKS}


def test_the_command_line_loads_nothing_heavy() -> None:
    assert not loaded_by("peri_tui.cli") & {"httpx", "websockets", "sqlite3", "aiofiles", "ssl"}


@pytest.mark.parametrize("module", ["peri_tui.agent.__main__", "peri_tui.agent.main"])
def test_the_agent_loads_no_sdk_and_no_screen(module: str) -> None:
    assert not loaded_by(module) & {*SCREEN, *SDKS}


def test_the_warden_imports_the_standard_library_alone() -> None:
    spec = importlib.util.find_spec("peri_tui.agent.processes.warden")
    if spec is None or spec.origin is None:
        pytest.skip("the warden is not built yet")
    probe = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('warden', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['warden'] = module\n"
        "spec.loader.exec_module(module)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", probe, spec.origin],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    names = {name.partition(".")[0] for name in done.stdout.split()} - {"warden"}
    assert names <= {*sys.stdlib_module_names, "__main__"}
