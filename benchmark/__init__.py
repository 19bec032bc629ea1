"""Measurements, one entry: ``python -m benchmark NAME`` with NAME a module below kernels/, training/ or coverage/.

Each report stands beside its measurement, ``x_report.py`` beside ``x.py``; common/ holds what they share.
"""
