"""Reports about plans: one offline HTML file, and exports for the viewers of Perfetto and PyTorch."""

from checkmate.report.memory_snapshot import memory_snapshot
from checkmate.report.page import html_report
from checkmate.report.perfetto import perfetto_trace

__all__ = ["html_report", "memory_snapshot", "perfetto_trace"]
