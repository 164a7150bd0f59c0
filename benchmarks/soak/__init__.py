"""A cluster under load and faults for minutes to hours, every answer checked."""
