"""What a drawn page is worth: panel by panel, and the reasons to fail."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table

from prefixwatch.dashboards.queries.check import MayBeEmpty, may_be_empty, reason
from prefixwatch.dashboards.queries.inventory import Asked
from prefixwatch.dashboards.queries.panel_queries import MISSING
from tests.dashboards.render.layout import defects
from tests.dashboards.render.page_input import Answered, Theme
from tests.dashboards.render.pictures import PanelShown, Shown

Outcome = Literal["drawn", "query only", "empty, listed", "failed"]
_WRONG_TEXTS = ("NaN", "∞", "undefined", "[object Object]", "An unexpected error happened")
"""What a panel never should say: a number that is none (one infinite value empties a whole chart), or a component that
gave up.
"""


@dataclass(frozen=True, slots=True)
class PanelVerdict:
    title: str
    kind: str
    series: int
    outcome: Outcome
    why: str = ""


@dataclass(frozen=True, slots=True)
class PageVerdict:
    """One picture."""

    dashboard: str
    theme: Theme
    panels: list[PanelVerdict]
    errors: list[str]
    """Of the page as a whole: its console's, its layout's."""

    @property
    def failures(self) -> list[str]:
        page = f"{self.dashboard} ({self.theme})"
        failed = [f"{page}: '{each.title}': {each.why}" for each in self.panels if each.outcome == "failed"]
        return [*(f"{page}: {error}" for error in self.errors), *failed]


def judge(name: str, theme: Theme, answered: Sequence[Answered], shown: Shown) -> PageVerdict:
    """`answered` and `shown` are of the same page, in the same order; rows' headings aren't shown as panels."""
    listed = may_be_empty()
    asked = [each for each in answered if not each.placed.is_row]
    errors = [*defects([each.placed for each in answered]), *shown.errors]
    if len(asked) != len(shown.panels):
        errors.append(f"{len(shown.panels)} of {len(asked)} panels are on the page")
    panels = [_judge_panel(name, *pair, listed) for pair in zip(asked, shown.panels, strict=False)]
    return PageVerdict(name, theme, panels, errors)


def _judge_panel(name: str, answered: Answered, shown: PanelShown, listed: MayBeEmpty) -> PanelVerdict:
    def verdict(outcome: Outcome, why: str = "") -> PanelVerdict:
        return PanelVerdict(shown.title, shown.kind, series_with_values(answered), outcome, why)

    if wrong := _wrong_look(shown):
        return verdict("failed", wrong)
    if not series_with_values(answered):
        why = _why_empty(name, answered, listed)
        return verdict("empty, listed", why) if why else verdict("failed", f"no data: it says '{shown.text.strip()}'")
    if "No data" in shown.text:
        return verdict("failed", "says 'No data' though its queries have answers")
    return verdict("query only" if shown.state == "not drawn" else "drawn")


def _wrong_look(shown: PanelShown) -> str | None:
    """What no panel may look like, with data or without."""
    said = next((text for text in _WRONG_TEXTS if text in shown.text), None)
    faults = {
        f"drawn {shown.width} px wide and {shown.height} px high": shown.height <= 0 or shown.width <= 0,
        "is blank": not shown.text.strip(),
        f"says '{said}'": said is not None,
        "its title is cut off": shown.title_cut_off,
        "its bars or columns don't fit": shown.cut_off,
    }
    return next((fault for fault, present in faults.items() if present), None)


def series_with_values(answered: Answered) -> int:
    """Frames with a number in them; those that only tell of lost metrics have none."""
    return sum(
        any(field["type"] == "number" and any(map(math.isfinite, field["values"])) for field in frame["fields"])
        for frame in answered.frames
    )


def _why_empty(name: str, answered: Answered, listed: MayBeEmpty) -> str | None:
    """The listed reasons, if each of its queries has one."""
    panel = answered.placed.panel
    reasons = [
        reason(Asked(name, answered.placed.title, target["refId"], target["expr"], "range"), listed)
        for target in panel.get("targets", ())
        if target["refId"] != MISSING
    ]
    found = [each for each in reasons if each]
    return "; ".join(dict.fromkeys(found)) if len(found) == len(reasons) else None


def counted(verdicts: Sequence[PageVerdict]) -> Mapping[Outcome, int]:
    """Panels of all pictures by outcome."""
    return Counter(panel.outcome for verdict in verdicts for panel in verdict.panels)


def table(verdicts: Sequence[PageVerdict]) -> Table:
    """A line a panel, over all the pictures of it."""
    drawn = Table("dashboard", "panel", "kind", "series", "outcome", "why")
    seen = set()
    for verdict in verdicts:
        for each in verdict.panels:
            key = (verdict.dashboard, each.title, each.outcome)
            if key not in seen:
                seen.add(key)
                drawn.add_row(verdict.dashboard, each.title, each.kind, str(each.series), each.outcome, each.why)
    return drawn
