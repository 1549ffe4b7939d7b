"""Reports: the `log_lines`, the runs of trackers (`tracking`), and hints for errors of torch (`error_hints`)."""
