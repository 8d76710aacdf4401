"""Runs whole forwards on CPUs as one call. A forward is a program of few operations, which a team of threads runs
without the interpreter.
"""
