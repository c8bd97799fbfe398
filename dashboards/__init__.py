"""Figures and pages: data first, picture second."""
