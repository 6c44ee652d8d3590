"""Mutation tests: cosmic-ray's operators change one place of the library at a time, and the tests must fail.

`python -m tests.mutants` draws a sample of mutants, runs the tests of each one's folder, and reports the
survivors. A survivor changes nothing that can be observed, or shows what the tests do not check.
"""
