"""What must outlive a process: records in SQLite or PostgreSQL, behind one seam."""
