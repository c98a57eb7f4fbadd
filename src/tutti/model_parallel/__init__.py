"""Model parallelism: several ranks hold one model together. A file for each way; `layout` has their names."""
