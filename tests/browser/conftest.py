"""Pictures are made by hand."""

collect_ignore = ["screenshots.py"]
