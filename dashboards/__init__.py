"""Figures and pages: data first (`get_*_info`), picture second (`plot_*`), pages from both."""
