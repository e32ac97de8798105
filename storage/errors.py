"""What storage raises where it is set up; once set up, a tier reports faults as outcomes and raises nothing."""


class StorageError(Exception):
    """A tier, store or cache folder cannot be used as asked; the message names the path or size."""


class CacheInUseError(StorageError):
    """Another process holds this cache file."""
