"""Pictures of what a student makes."""
