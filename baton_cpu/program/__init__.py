"""Whole forwards on CPUs as one call: a program of few operations, run by a team of threads without the interpreter."""
