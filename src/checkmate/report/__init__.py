"""Reports about plans: one offline HTML file, and exports for the viewers of Perfetto and PyTorch."""

from checkmate.report.exports import memory_snapshot, perfetto_trace
from checkmate.report.page import PageText, html_report

__all__ = ["PageText", "html_report", "memory_snapshot", "perfetto_trace"]
