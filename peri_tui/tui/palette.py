"""The command palette's entries, from the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider

from peri_tui.tui.actions import Action, for_palette

if TYPE_CHECKING:
    from peri_tui.tui.app import PeriApp


class PeriCommands(Provider):
    """What can be done now."""

    def _actions(self) -> list[Action]:
        return list(for_palette(cast("PeriApp", self.app).view))

    async def discover(self) -> Hits:
        """Yield everything, for an empty search."""
        for action in self._actions():
            yield DiscoveryHit(_title(action), self._runner(action), help=action.slash or None)

    async def search(self, query: str) -> Hits:
        """Yield what matches."""
        matcher = self.matcher(query)
        for action in self._actions():
            score = matcher.match(action.title)
            if score > 0:
                yield Hit(
                    score, matcher.highlight(action.title), self._runner(action), help=action.slash or None
                )

    def _runner(self, action: Action):  # type: ignore[no-untyped-def]  # noqa: ANN202
        app = cast("PeriApp", self.app)
        return lambda: app.perform(action)


def _title(action: Action) -> str:
    return f"{action.title}  {action.shown_key}".rstrip()
