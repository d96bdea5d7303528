"""How good a model is: suites, metrics, scores before and after.

What is measured is the file that is shipped, run by llama.cpp.
"""
