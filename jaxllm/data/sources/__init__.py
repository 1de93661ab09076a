"""Where documents come from: files of every usual kind, here or behind a URL, and what comes with packages."""
