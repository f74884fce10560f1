"""Who scores: drafts behind one base class."""
