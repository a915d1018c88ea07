"""A *Verdict* tab on Locust's web page: the grade of the last test, and a link to its report.

Locust documents both ways in: `web_ui.template_args` for tabs and tables of the page, and the Flask application for
additional routes and for values in the answer of `/stats/requests`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from flask import Blueprint, Response, request, send_file

KEY = "prefixwatch-verdict"
REPORT = "/prefixwatch/report"
WAITING = "The test is graded when it ends. Give --slo ttft,goodput and --out FOLDER."
# Locust sorts tables by a column "name", if there is one.
_COLUMNS = (("judged", "Judged"), ("measured", "Measured"), ("interval", "95 % interval"), ("result", "Result"))

_tabs: WeakKeyDictionary[Any, VerdictTab] = WeakKeyDictionary()


class VerdictTab:
    """The tab of one Locust process; `show` fills it."""

    def __init__(self, web_ui: Any) -> None:
        self._rows = [_row("Verdict", result=WAITING)]
        self._report: Path | None = None
        web_ui.template_args |= {
            "extended_tabs": [{"title": "Verdict", "key": KEY}],
            "extended_tables": [{"key": KEY, "structure": [{"key": key, "title": title} for key, title in _COLUMNS]}],
            "extended_csv_files": [{"href": REPORT, "title": "prefixwatch report (HTML)"}],
        }
        pages = Blueprint("prefixwatch", __name__)
        pages.add_url_rule(REPORT, "report", web_ui.auth_required_if_enabled(self._send_report))
        web_ui.app.register_blueprint(pages)
        web_ui.app.after_request(self._with_rows)

    def show(self, summary: Any, folder: Path) -> None:
        """The result of the test that just ended."""
        self._report = folder / "report.html"
        self._rows = verdict_rows(summary)

    def _with_rows(self, response: Response) -> Response:
        if request.path.endswith("/stats/requests") and response.is_json:
            shown = {"extended_stats": [{"key": KEY, "data": self._rows}]}
            response.set_data(json.dumps({**(response.json or {}), **shown}))
        return response

    def _send_report(self) -> Response:
        if self._report is None or not self._report.exists():
            return Response(f"{WAITING}\n", status=404, mimetype="text/plain")
        return send_file(self._report.absolute())


def add_tab(environment: Any) -> None:
    """Give this process's web page the tab; nothing without a page."""
    if environment.web_ui is not None and environment not in _tabs:
        _tabs[environment] = VerdictTab(environment.web_ui)


def show(environment: Any, summary: Any, folder: Path) -> None:
    """Fill the tab, where there is one."""
    if (tab := _tabs.get(environment)) is not None:
        tab.show(summary, folder)


def verdict_rows(summary: Any) -> list[dict[str, str]]:
    """The verdict with its reasons and notes, then each policy's objectives."""
    from prefixwatch.loadgen.report.rows import objective_row  # noqa: PLC0415  # brings pandas and plotly: a second

    rows = [_row("Verdict", result=summary.verdict.upper().replace("_", " "))]
    rows += [_row("not valid", result=reason.removeprefix(": ")) for reason in summary.validity.reasons]
    for policy, own in summary.policies.items():
        for objective in own.objectives:
            found = objective_row(policy, objective)
            rows.append(_row(found["name"], found["measured"], found["ci95"], found["result"]))
    return rows + [_row("note", result=note) for note in summary.notes]


def _row(name: str, measured: str = "", interval: str = "", result: str = "") -> dict[str, str]:
    return {"judged": name, "measured": measured, "interval": interval, "result": result}
