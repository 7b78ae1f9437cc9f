"""Token files on disk: reading, writing, sidecar, metadata, and blocks of remote files."""
