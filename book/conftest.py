"""Pages are tested as doctests; the Python of the build is tested by `tests/book`."""

collect_ignore_glob = ["*.py"]
