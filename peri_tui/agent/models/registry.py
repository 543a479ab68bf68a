"""Opens the model that a task asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from peri_tui.agent.models.call import Clocks, Model
from peri_tui.agent.models.offline import OfflineModel
from peri_tui.config import PROVIDERS_BUILT, PROVIDERS_LATER
from peri_tui.core.messages import ModelChoice
from peri_tui.errors import ConfigError, ModelAuthFailed, UsageError

OPENAI_URL: Final = "https://api.openai.com/v1"
# What a local server with one model is asked for; such servers do not look at the name.
ANY_MODEL: Final = "default"


def open_model(
    choice: ModelChoice,
    *,
    key: str = "",
    clocks: Clocks | None = None,
    offline_rate: float = 60.0,
    environ: Mapping[str, str] = os.environ,
) -> Model:
    """Return a model for one task. Nothing is connected yet.

    Args:
        choice: provider, base URL and model name.
        key: the user's key, empty for none; goes into the request header and nowhere else.
        clocks: limits of one turn.
        offline_rate: tokens a second of the offline model; 0 for no delay.
        environ: where proxies are looked up.

    Raises:
        UsageError: the provider is unknown or not built yet, or a model name is missing.
        ModelAuthFailed: the provider needs a key and there is none.
        ConfigError: the key cannot be sent.
    """
    if choice.provider == "offline":
        return OfflineModel(rate=offline_rate)
    if choice.provider in PROVIDERS_LATER:
        raise UsageError(
            f"--provider {choice.provider}: not built yet; now there are {', '.join(PROVIDERS_BUILT)}"
        )
    if choice.provider != "openai":
        raise UsageError(f"--provider {choice.provider}: unknown; there are {', '.join(PROVIDERS_BUILT)}")
    return _open_openai(choice, key, clocks or Clocks(), environ)


def _open_openai(choice: ModelChoice, key: str, clocks: Clocks, environ: Mapping[str, str]) -> Model:
    from peri_tui.agent.models.openai import OpenAiModel
    from peri_tui.net import ModelTransport

    base_url = choice.base_url or OPENAI_URL
    official = urlsplit(base_url).hostname == urlsplit(OPENAI_URL).hostname
    if official and not key:
        raise ModelAuthFailed("api.openai.com needs a key: set PERI_API_KEY or OPENAI_API_KEY")
    if official and not choice.model:
        raise UsageError("no model named: give --model or set PERI_MODEL")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("PERI_API_KEY or OPENAI_API_KEY: holds a character that a header cannot carry")
    return OpenAiModel(
        base_url,
        choice.model or ANY_MODEL,
        key=key,
        transport=ModelTransport(connect_s=clocks.connect, environ=environ),
        clocks=clocks,
    )
