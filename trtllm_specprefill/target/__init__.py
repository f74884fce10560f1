"""Who answers: targets behind one base class."""
