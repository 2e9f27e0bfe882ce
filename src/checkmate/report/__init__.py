"""Reports about plans: one offline HTML file, and a trace for the viewer of Perfetto."""

from checkmate.report.data import perfetto_trace
from checkmate.report.page import PageText, html_report

__all__ = ["PageText", "html_report", "perfetto_trace"]
