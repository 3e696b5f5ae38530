"""Rows to figures, tables and one HTML page. Never trains."""

from intention.lab.report.page import Report, write_report

__all__ = ["Report", "write_report"]
