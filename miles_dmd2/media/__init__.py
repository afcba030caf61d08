"""Pictures and clips of what a student makes, as files."""
