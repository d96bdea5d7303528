"""Evaluation: suites, metrics, scores before and after. The exported file is measured, run by llama.cpp."""
