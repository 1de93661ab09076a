"""Data sources: documents from local or remote files of the usual formats, and from installed packages."""
