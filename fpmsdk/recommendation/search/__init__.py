"""Algorithms that choose which candidates are evaluated, and the loop that has them evaluated.

Source: predict-recommend.md section 8.
"""
