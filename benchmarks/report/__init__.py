"""Pages and pictures of docs/performance, made from the records."""
