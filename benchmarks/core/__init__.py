"""What every subject shares: timing, records, the command line."""
