"""Command line: parse, call one function, print."""
