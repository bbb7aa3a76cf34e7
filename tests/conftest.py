"""What all tiers share: tables that tests hand to the end of pytest's output."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as ``record_property("summary", text)``, also under xdist."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, text in getattr(report, "user_properties", ()):
                if name == "summary":
                    terminalreporter.section("recorded by " + report.nodeid.rsplit("/", 1)[-1])
                    terminalreporter.write_line(str(text))
