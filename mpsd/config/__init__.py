"""The configuration: its schema, its reader, the directories that follow from it."""
