"""Stand-alone scripts that load an export with an engine's own classes, in a process of their own."""
