"""The live view of a run, from its records only: any process that can read the folder may watch."""
