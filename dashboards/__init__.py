"""Figures and pages in three layers: data (`get_*_info`), figures (`plot_*`), and pages made from both."""
