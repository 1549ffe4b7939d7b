"""What is reported: `log_lines`, the runs of trackers (`tracking`), and what explains an error of torch (`error_hints`)."""
