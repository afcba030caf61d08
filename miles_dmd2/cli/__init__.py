"""Parts of the command line that are more than its options."""
