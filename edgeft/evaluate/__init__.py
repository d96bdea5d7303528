"""Evaluation: suites, metrics, scores before and after.

The shipped file is measured, run by llama.cpp.
"""
